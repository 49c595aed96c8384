"""What blocks, activations and losses may be in a pipeline: all equal one device (loss 1e-6, gradients 1e-5)."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxshard as js
from tests.engines.pipeline.pipes import WIDTH, Ring, reference, residual_block, stack_toy
from tests.toys import assert_equal_runs, loss_error, one_device, start_of, tree_error

TABLE = np.linspace(-1, 1, WIDTH, dtype=np.float32)


def scanning(params, x, key):
    """Two turns with the same weights: their gradient is needed by none of the input's, but comes with it."""
    return lax.scan(lambda x, _: (residual_block(params, x, key) / 2, None), x, length=2)[0]


def recomputing(params, x, key):
    return jax.checkpoint(lambda x: residual_block(params, x, key))(x) * 0.9


@jax.custom_vjp
def _halved(x, w):
    return x @ w


def _halved_backward(residuals, dy):
    x, w = residuals
    return dy @ w.T / 2, x.T @ dy / 3


_halved.defvjp(lambda x, w: (x @ w, (x, w)), _halved_backward)


def own_derivative(params, x, key):
    """Derivatives that are wrong, but the same everywhere."""
    return x + jnp.tanh(_halved(x, params["w"]) + params["b"])


@jax.jit
def _compiled(params, x):
    return x + jnp.tanh(x @ params["w"] + params["b"])


def calling(params, x, key):
    return _compiled(params, x) - jax.nn.silu(x) / 2


def closing_over(params, x, key):
    table = jnp.asarray(TABLE) * 2
    return x + jnp.tanh(x @ params["w"] + params["b"]) * TABLE + lax.stop_gradient(table)


def leaving_out(params, x, key):
    """One of its weights."""
    return x + jnp.tanh(x @ params["w"])


def linear(params, x, key):
    return x @ params["w"] + x + params["b"]


def forgetting(params, x, key):
    """Its input."""
    return jnp.zeros_like(x) + jnp.tanh(params["b"] + params["w"].sum(0))


def dividing(params, x, key):
    """By what is zero for weights of padding, and for activations that nobody has sent."""
    w = params["w"] / jnp.linalg.norm(params["w"])
    x = x + jnp.log(jnp.square(x).sum(-1, keepdims=True)) / 8
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True) + jnp.tanh(x @ w) + params["b"]


def everything(params, x, key):
    x = scanning(params, x, key)
    return closing_over(params, own_derivative(params, calling(params, recomputing(params, x, key), key), key), key) / 4


BLOCKS = [scanning, recomputing, own_derivative, calling, closing_over, leaving_out, linear, forgetting]
BLOCKS += [dividing, everything]


def own_table(p, m):
    """gpipe's, with the backwards in the other order."""
    forwards = [(s + i, s, "F", 0, i) for s in range(p) for i in range(m)]
    backwards = [(p + m - 1 + (p - 1 - s) + i, s, "B", 0, m - 1 - i) for s in range(p) for i in range(m)]
    return js.schedules.Schedule("a table of your own", p, m, 1, (*forwards, *backwards))


CELLS = [(own_table(4, 4), "everything", dividing), ("one_f_one_b", "everything", dividing)]
CELLS += itertools.product(("interleaved", "zero_bubble"), ("stage", "everything"), BLOCKS)


def name_of(part):
    """Of a block, a stash, a schedule or its table."""
    return part.name if isinstance(part, js.schedules.Schedule) else getattr(part, "__name__", part)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("schedule", "stash", "block"), CELLS, ids=name_of)
def test_blocks_of_all_kinds(schedule, stash, block):
    """Five of them in stages of two, the last one without any."""
    engine = js.pipelined(microbatches=4, schedule=schedule, stash=stash)
    trace, _ = Ring(4, 1).run(stack_toy(block, 5), engine)
    assert_equal_runs(trace, reference(stack_toy, block, 5))


# Frozen parameters.

FROZEN = {"ends": ("embed", "head"), "embedding and biases": ("embed", "blocks/b"), "blocks": ("blocks",)}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("schedule", ["zero_bubble", "interleaved"])
def test_frozen_parameters_stay_and_the_others_equal_one_device(schedule, frozen):
    """The others within 1e-5."""
    toy = stack_toy(residual_block, 5)

    def trainable(path: str) -> bool:
        return not path.startswith(FROZEN[frozen])

    def stopped(params, batch, key):
        def one(path, x):
            return x if trainable("/".join(part.key for part in path)) else lax.stop_gradient(x)

        return toy.loss_fn(jax.tree_util.tree_map_with_path(one, params), batch, key)

    tx, engine = optax.sgd(toy.rate, momentum=0.9), js.pipelined(microbatches=3, schedule=schedule)
    trace, layout = Ring(2, 2).run(toy, engine, tx, trainable=trainable)
    alone = one_device(toy._replace(loss_fn=stopped), tx, steps=2)
    assert loss_error(trace, alone) <= 1e-6
    assert tree_error(trace.params, alone.params) <= 1e-5
    moved = {p.leaf.path for p in layout.placed() if p.role == "grad"}
    for path, x in jax.tree_util.tree_leaves_with_path(start_of(toy.init_fn)):
        name = "/".join(part.key for part in path)
        last = trace.params
        for part in path:
            last = last[part.key]
        assert (name in moved) == trainable(name) == (not np.array_equal(last, x))
