"""Losses whose devices may part ways at a branch with a collective inside: refused before anything is compiled.

Refused programs would hang, so none of them is ever run; where a program is let through it is only lowered, but for one
that is compared with one device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec

import jaxshard as js
from tests.toys import normal

WIDTH = 8
ROWS = 16
TX = optax.sgd(0.1)
FSDP = js.fsdp("data", min_size=0)
RNG = np.random.default_rng(0)
# Half of the devices have no row that counts.
BATCH = {"x": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32), "keep": np.arange(ROWS) < ROWS // 2}
HANGS = "the step could hang"


def mesh(**axes):
    return js.make_mesh(**(axes or {"data": 8}))


def mean(x):
    return js.Mean((x**2).sum(), x.size)


def init(key):
    return {"w": normal(0, WIDTH, WIDTH) / 3, "out": normal(1, WIDTH, 512) / 3}


def make(loss, engine, init_fn=init, strategy=FSDP, **axes):
    layout = js.layout(strategy, mesh(**axes), init_fn, TX)
    return js.make_step(loss, TX, layout, engine=engine)


def of_any(fn, other=lambda x: x, agree=lambda needed: needed):
    """A function that runs only where a row at hand needs it."""
    return lambda batch: lax.cond(agree(batch["keep"].any()), fn, other, batch["x"])


# Linen and NNX


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(WIDTH)(x))


class Skips(nn.Module):
    """A block that is skipped where no row needs it, and what it may be."""

    inner: type = Block
    agree: str = ""

    @nn.compact
    def __call__(self, x, keep):
        inner = self.inner(name="inner")
        if self.is_initializing():
            return inner(x)
        needed = jnp.any(keep)
        if self.agree:
            needed = lax.pmax(needed, (self.agree,))
        return nn.cond(needed, lambda m, x: inner(x), lambda m, x: x, self, x)


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        axis = None if self.is_initializing() else "data"
        return nn.BatchNorm(use_running_average=False, axis_name=axis, name="norm")(nn.Dense(WIDTH)(x))


def loss_of_rows(model, batch):
    return mean(model(batch["x"], batch["keep"]))


def linen(engine, **choices):
    model = js.linen(Skips(**choices), loss_of_rows, BATCH)
    return make(model.loss, engine, model.init)


# Plain functions


def head(params, batch, key):
    def score(x):
        labels, weights = jnp.zeros(len(x), int), batch["keep"].astype(jnp.float32)
        scored = js.head_loss(x, params["out"], labels, weights, chunks=4)
        return scored.totals[0], scored.weights[0]

    return js.Mean(*of_any(score, lambda x: (0.0, 0.0))(batch))


def pooled(agree=lambda needed: needed):
    """The rows less their mean over all devices, where a row needs it."""

    def loss(params, batch, key):
        return mean(of_any(lambda x: x @ params["w"] - lax.pmean(x, "data"), agree=agree)(batch))

    return loss


def expert_loss(params, batch, key):
    def fn(params, rows, dot):
        return dot(jax.nn.silu(dot(rows, params["up"])), params["down"])

    def mix(x):
        return js.moe(x[:, None], x[:, None] @ params["router"], fn, params["moe"], k=2)[0][:, 0]

    return mean(of_any(mix)(batch))


def experts(engine):
    def init_fn(key):
        shapes = {"router": (WIDTH, 4), "moe": {"up": (4, WIDTH, 8), "down": (4, 8, WIDTH)}}
        return jax.tree.map(lambda s: jax.random.normal(key, s) / 3, shapes, is_leaf=lambda s: isinstance(s, tuple))

    rules = [("moe/up", ("expert", None, None)), ("moe/down", ("expert", None, None)), *js.RULES]
    strategy = js.compose(js.fsdp(("data", "expert"), min_size=0), js.expert("expert", rules=rules))
    return make(expert_loss, engine, init_fn, strategy, data=4, expert=2)


def attends(engine):
    def loss(params, batch, key):
        def attend(x):
            heads = (x @ params["w"]).reshape(*x.shape[:2], 2, -1)
            return js.attention(heads, heads, heads, causal=True).reshape(x.shape)

        return mean(lax.cond(batch["keep"].any(), attend, lambda x: x, batch["tokens"]))

    strategy = js.compose(FSDP, js.context("context", how="ring"))
    return make(loss, engine, strategy=strategy, data=4, context=2)


UNITS = js.explicit(units=[Block])
BATCHES = {"ring attention": {"tokens": np.repeat(BATCH["x"][:8, None], 4, axis=1), "keep": np.arange(8) < 2}}

REFUSED = {
    "a chunked head": (lambda: make(head, js.explicit()), "all_gather of a chunk of js.head_loss"),
    "a sum of the user's": (lambda: make(pooled(), js.explicit()), "psum of f32[2,8] over ['data']"),
    "BatchNorm over devices": (lambda: linen(js.explicit(), inner=Norm), "psum of BatchNorm(axis_name)"),
    "experts": (lambda: experts(js.explicit()), "all_gather of js.moe"),
    "ring attention": (lambda: attends(js.explicit()), "ppermute of js.attention"),
}
PASSED = {
    "a Linen unit": lambda: linen(UNITS),
    "a unit that all run or none": lambda: linen(UNITS, agree="data"),
    "a sum that all take or none": lambda: make(pooled(lambda needed: lax.pmax(needed, ("data",))), js.explicit()),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("experts", "ring attention"))) for name in REFUSED]
)
def test_a_step_is_refused(name):
    make_case, inside = REFUSED[name]
    with pytest.raises(ValueError, match=HANGS) as error:
        make_case().lower(BATCHES.get(name, BATCH))
    assert inside in str(error.value) and f"{__file__}:" in str(error.value)


@pytest.mark.parametrize("name", PASSED)
def test_a_step_is_let_through(name):
    PASSED[name]().lower(BATCHES.get(name, BATCH))


@pytest.mark.slow
def test_a_unit_that_all_devices_run_together_equals_one_device():
    """Loss to 1e-6, gradients to 1e-5: the way out that the message names is right."""
    model, alone = (js.linen(Skips(agree=agree), loss_of_rows, BATCH) for agree in ("data", ""))
    layout = js.layout(FSDP, mesh(), model.init, TX)
    run = js.init(model.init, TX, layout, key=0)
    loss, grads = js.value_and_grad(model.loss, layout, UNITS)(run, BATCH)
    params = js.logical(run, layout).params
    expected, right = jax.value_and_grad(lambda params: alone.loss(params, BATCH, jax.random.key(0)).value)(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    largest = max(np.abs(x).max() for x in jax.tree.leaves(right))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * largest), grads, right)


def test_everything_that_runs_a_loss_refuses_it():
    """A step that is called, in a program of the user's too, `value_and_grad`, evaluation, apply and parity."""
    step = make(pooled(), js.explicit())
    layout, run = step.layout, js.init(init, TX, step.layout, key=0)
    gradient = js.value_and_grad(pooled(), layout, js.explicit())
    together = js.make_eval_step(
        lambda params, batch: {"loss": pooled()(params, batch, None)}, layout, engine=js.explicit(reduction="ordered")
    )
    rows = PartitionSpec("data")

    def own_map(params, x):
        def on_device(x):
            return lax.cond(x.sum() > 0, lambda: lax.psum(x, "data"), lambda: x)

        return jax.shard_map(on_device, mesh=layout.mesh, in_specs=rows, out_specs=rows, check_vma=False)(x)

    several = jax.tree.map(lambda x: np.stack([x, x]), BATCH)
    for what, call in {
        "the step": lambda: step(run, BATCH),
        "the step ": lambda: jax.jit(step)(run, BATCH),
        "the step  ": lambda: jax.jit(lambda run: lax.scan(step, run, several))(run),
        "js.value_and_grad": lambda: gradient(run, BATCH),
        "js.value_and_grad ": lambda: jax.jit(gradient)(run, BATCH),
        "the evaluation": lambda: together(run, BATCH),
        "the function of js.make_apply": lambda: js.make_apply(own_map, layout)(run, BATCH["x"]),
        "the step   ": lambda: js.parity(init, pooled(), TX, FSDP, layout.mesh, BATCH, engine=js.explicit()),
    }.items():
        with pytest.raises(ValueError, match=rf"^{what.strip()} could hang"):
            call()


@pytest.mark.slow
def test_the_audit_warns_of_what_the_compiler_puts_into_a_branch():
    """A permute over the tensor axis, in a branch on rows: all devices of the mesh take part in permutes."""

    def loss_of(shift):
        def loss(params, batch, key):
            def widen(x):
                hidden = js.constrain(jnp.tanh(x @ params["up"]), ("batch", "mlp"))
                return js.constrain(jnp.roll(hidden, shift, axis=1), ("batch", "mlp")) @ params["down"]

            return mean(lax.cond(batch["keep"].any(), widen, lambda x: x, batch["x"]))

        return loss

    def init_fn(key):
        return {"up": jax.random.normal(key, (WIDTH, 32)) / 3, "down": jax.random.normal(key, (32, WIDTH)) / 3}

    rules = [("up", (None, "mlp")), ("down", ("mlp", None)), *js.RULES]
    strategy = js.compose(FSDP, js.tensor(rules))
    moves = make(loss_of(1), js.explicit(), init_fn, strategy, data=4, tensor=2)
    with pytest.warns(UserWarning, match=rf"{__file__}:\d+: devices may .*'data'.*collective-permute over tensor"):
        js.audit(moves, BATCH)
    stays = make(loss_of(0), js.explicit(), init_fn, strategy, data=4, tensor=2)
    js.audit(stays, BATCH)  # sums over tensor in the same branch are of devices that take it together
    assert stays.choices
