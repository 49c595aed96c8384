"""`js.moe`: routing, products, how layouts split the experts, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

SGD = optax.sgd(0.1)
E, C, H = 8, 8, 16


def mlp(params, rows, dot):
    hidden = jax.nn.silu(dot(rows, params["gate"])) * dot(rows, params["up"])
    return dot(hidden, params["down"])


def mlp_params(key, experts=E):
    shapes = {"gate": (experts, C, H), "up": (experts, C, H), "down": (experts, H, C)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, shapes[name]) / 3 for name, k in zip(shapes, keys)}


def all_experts(x, logits, params, k, scores="softmax", normalize=True, scale=1.0, bias=0.0):
    """Every expert for every token, and of these the weighted sum."""
    score = jax.nn.softmax(logits) if scores == "softmax" else jax.nn.sigmoid(logits)
    chosen = jax.nn.one_hot(jax.lax.top_k(score + bias, k)[1], logits.shape[-1]).sum(-2)
    weights = score * chosen
    weights = scale * (weights / weights.sum(-1, keepdims=True) if normalize else weights)
    hidden = jax.nn.silu(jnp.einsum("...c,ech->...eh", x, params["gate"]))
    hidden = hidden * jnp.einsum("...c,ech->...eh", x, params["up"])
    return jnp.einsum("...e,...eh,ehc->...c", weights, hidden, params["down"])


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_close(found, expected, tolerance):
    """Per array, over the larger of its largest magnitude and 1e-3 of the tree's."""
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(a - b)).max() <= tolerance * max(1e-3 * largest, np.abs(np.asarray(b)).max())


@pytest.mark.parametrize(
    "how",
    [
        {"k": 2},
        {"k": 3, "scores": "sigmoid", "scale": 2.5},
        *(pytest.param({"k": k, "normalize": k == 1}, marks=pytest.mark.slow) for k in range(1, E + 1)),
    ],
    ids=str,
)
def test_equals_all_experts_for_all_tokens(how):
    """Outputs to 1e-6, gradients to 1e-5."""
    arrays = normal(0, 2, 20, C), normal(1, 2, 20, E), mlp_params(jax.random.key(0))

    def ours(x, logits, params):
        y = js.moe(x, logits, mlp, params, **how)[0]
        return (y**2).sum(), y

    def theirs(x, logits, params):
        y = all_experts(x, logits, params, **how)
        return (y**2).sum(), y

    ((_, y), grads), ((_, expected), expected_grads) = (
        jax.jit(jax.value_and_grad(fn, (0, 1, 2), has_aux=True))(*arrays) for fn in (ours, theirs)
    )
    assert_close(y, expected, 1e-6)
    assert_close(grads, expected_grads, 1e-5)


# Layouts


def moe_model(routing="random", k=2, experts=E, **how):
    """(init_fn, loss_fn) of one layer of experts; the batch brings what makes its routing uneven."""

    def init_fn(key):
        return {"router": jax.random.normal(key, (C, experts)), "moe": mlp_params(key, experts)}

    def loss_fn(params, batch, key):
        logits = batch["x"] @ params["router"] + batch["logits"]
        y, record = js.moe(batch["x"], logits, mlp, params["moe"], k=k, hidden={"gate": 2, "up": 2, "down": 1}, **how)
        load = record.load / (k * logits.shape[-2] / experts)
        balance = (load * record.probabilities).sum(-1) / logits.shape[-2]
        metrics = {"dropped": js.Sum(record.dropped.sum()), "load": js.Sum(record.load.sum())}
        loss = js.Mean((y**2).sum(), y.size) + 0.1 * js.Mean(balance.sum(), balance.size)
        return js.Loss(loss + 0.01 * js.Mean(record.z.sum(), record.z.size * logits.shape[-2]), metrics=metrics)

    return init_fn, loss_fn


def batch_of(kind, rows=8, tokens=12, experts=E):
    logits = np.zeros((rows, tokens, experts), np.float32)
    if kind == "one":  # everything goes to the first experts: one device gets all, others get nothing
        logits[..., :2] = 50
    return {"x": normal(2, rows, tokens, C), "logits": jnp.asarray(logits)}


FSDP = js.fsdp(min_size=0)
EXPERT = js.compose(FSDP, js.expert())
TENSOR = js.tensor([("experts", "whole"), *js.RULES])
LAYOUTS = {
    "auto": ({"data": 8}, FSDP, js.auto()),
    "explicit": ({"data": 8}, FSDP, js.explicit()),
    "auto-expert": ({"data": 2, "expert": 4}, EXPERT, js.auto()),
    "auto-expert-8": ({"expert": 8}, js.compose(js.fsdp("expert", min_size=0), js.expert()), js.auto()),
    "explicit-expert": ({"data": 2, "expert": 4}, EXPERT, js.explicit()),
    "explicit-expert-2": ({"data": 4, "expert": 2}, EXPERT, js.explicit()),
    "explicit-shared": ({"data": 8}, js.compose(FSDP, js.expert("data")), js.explicit()),
    "auto-expert-tensor": ({"data": 2, "expert": 2, "tensor": 2}, js.compose(EXPERT, js.tensor()), js.auto()),
    "explicit-expert-tensor": ({"data": 2, "expert": 2, "tensor": 2}, js.compose(EXPERT, js.tensor()), js.explicit()),
    "auto-tensor": ({"data": 2, "tensor": 4}, js.compose(js.ddp(), TENSOR), js.auto()),
    "explicit-tensor": ({"data": 2, "tensor": 4}, js.compose(js.ddp(), TENSOR), js.explicit()),
}
FAST = [("explicit-expert-tensor", "even"), ("auto-expert", "one"), ("explicit-shared", "one")]
CELLS = [(name, kind) for name in LAYOUTS for kind in ("even", "one")]


@pytest.mark.parametrize(
    ("name", "kind"), [cell if cell in FAST else pytest.param(*cell, marks=pytest.mark.slow) for cell in CELLS]
)
def test_a_layout_splits_it_and_one_device_is_equalled(name, kind):
    axes, strategy, engine = LAYOUTS[name]
    js.parity(*moe_model(), SGD, strategy, js.make_mesh(**axes), batch_of(kind), engine=engine).check()
