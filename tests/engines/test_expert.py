"""Engines under `js.expert`: losses equal those of one device within 1e-6, gradients within 1e-5 (`tree_error`).

The experts are computed by the plain formula: every token by every expert, those that it did not choose weighted zero.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxshard as js
from jaxshard.core.constrain import activations_in_force
from tests.toys import Toy, assert_equal_runs, mask, one_device, sharded

E, C, F, DEPTH, ROWS = 8, 16, 24, 4, 32


def formula(weights, x):
    """The sum over the experts at hand; `weights` are [rows, experts] of the experts at hand."""

    def of(up, down, gate):
        return gate[:, None] * (jax.nn.silu(x @ up) @ down)

    return jax.vmap(of, (0, 0, 1))(weights["up"], weights["down"], weights["gates"]).sum(0)


def experts(params, x):
    """Two of eight experts; where a device holds some alone, tokens are gathered and the sums are scattered."""
    probabilities = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(lax.top_k(probabilities, 2)[1], E).sum(1)
    gates, here = probabilities * chosen, len(params["up"])
    if here == E:
        return formula(params | {"gates": gates}, x)
    axes = activations_in_force().layout.expert.axis
    x, gates = (lax.all_gather(a, axes, tiled=True) for a in (x, gates))
    mine = lax.dynamic_slice_in_dim(gates, lax.axis_index(axes) * here, here, 1)
    return lax.psum_scatter(formula(params | {"gates": mine}, x), axes, tiled=True)


@cache
def moe_toy() -> Toy:
    def init(key):
        keys = jax.random.split(key, 5)
        block = {
            "router": jax.random.normal(keys[1], (C, E)) / 4,
            "up": jax.random.normal(keys[2], (E, C, F)) / 8,
            "down": jax.random.normal(keys[3], (E, F, C)) / 8,
        }
        return {
            "embed": jax.random.normal(keys[0], (5, C)) / 4,
            "block": block,
            "head": jax.random.normal(keys[4], (C, 5)) / 4,
        }

    def head(params, x, batch, key):
        error = jnp.square(x @ params["head"] - batch["y"]).sum(-1)
        return js.Mean((error * batch["weights"]).sum(), batch["weights"].sum())

    model = js.Stacked(
        lambda params, batch, key: batch["x"] @ params["embed"],
        lambda params, x, key: x + experts(params, x),
        head,
        DEPTH,
        init,
    )
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(ROWS, 5)).astype(np.float32) for _ in range(2))
    return Toy(model.init, model.loss, {"x": x, "y": y, "weights": mask((ROWS,))}, rate=0.001)


@cache
def reference():
    return one_device(moe_toy(), steps=3)


def fsdp(axis="data"):
    return js.fsdp(axis, min_size=0)


RULES = [("up", ("expert", "embed", "mlp")), ("down", ("expert", "mlp", "embed")), ("router", "whole"), *js.RULES]
EXPERT = js.expert(rules=RULES)
TENSOR = js.tensor([("embed", "whole"), ("head", "whole"), *RULES])
STRATEGIES = {
    "own axis": ({"data": 2, "expert": 4}, js.compose(fsdp(), EXPERT)),
    "alone": ({"expert": 8}, EXPERT),
    "both axes filled": ({"data": 4, "expert": 2}, js.compose(fsdp(("data", "expert")), EXPERT)),
    "shared with data": ({"data": 8}, js.compose(fsdp(), js.expert("data", rules=RULES))),
    "two axes": (
        {"data": 2, "expert": 4},
        js.compose(js.zero2(min_size=0), js.expert(("data", "expert"), rules=RULES)),
    ),
    "hsdp": ({"replica": 2, "data": 2, "expert": 2}, js.compose(js.hsdp(min_size=0), EXPERT)),
    "tensor": ({"data": 2, "expert": 2, "tensor": 2}, js.compose(fsdp(), EXPERT, TENSOR)),
}
ENGINES = {
    "auto": js.auto(),
    "explicit": js.explicit(),
    "explicit, turns": js.explicit(microbatches=2),
    "explicit, end": js.explicit(microbatches=2, scatter="end", remat="nothing"),
}
FAST: set[tuple[str, str]] = set()  # tests/models/test_moe.py has the fast ones


@pytest.mark.parametrize(
    ("strategy", "engine"),
    [pytest.param(s, e, marks=() if (s, e) in FAST else pytest.mark.slow) for s in STRATEGIES for e in ENGINES],
)
def test_experts_equal_one_device(strategy, engine):
    axes, placed = STRATEGIES[strategy]
    trace, layout = sharded(moe_toy(), placed, js.make_mesh(**axes), ENGINES[engine], steps=3)
    assert "expert" in layout.params["blocks"]["up"].use or strategy in ("shared with data", "two axes")
    assert_equal_runs(trace, reference())


@pytest.mark.slow
@pytest.mark.parametrize("scatter", ["end", "each"])
def test_experts_in_stages_equal_one_device(scatter):
    mesh = js.make_mesh(pipe=2, data=2, expert=2)
    engine = js.pipelined(microbatches=2, scatter=scatter)
    trace, _ = sharded(moe_toy(), js.compose(fsdp(), EXPERT, js.pipeline()), mesh, engine, steps=3)
    assert_equal_runs(trace, reference())
