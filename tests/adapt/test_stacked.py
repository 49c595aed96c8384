"""A model of identical blocks, described once: stacked parameters, a scan, and weights gathered inside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.hlo.found import collectives
from tests.toys import Toy, assert_equal_runs, one_device, sharded

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TX = optax.sgd(0.1)


def init_parts(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(a, (5, 6)),
        "block": {"w": jax.random.normal(b, (6, 6)) * 0.3, "b": jnp.zeros(6)},
        "head": {"out": jax.random.normal(c, (6, 3))},
    }


def embed(params, batch, key):
    assert set(params) == {"embed", "head"}
    return batch["x"] @ params["embed"]


def block(params, x, key):
    return x + jnp.tanh(x @ params["w"] + params["b"])


def head(params, x, batch, key):
    assert set(params) == {"embed", "head"}
    error = jnp.square(x @ params["head"]["out"] - batch["y"])
    return js.Mean(error.sum(), error.size)


def model_of(**changes):
    parts = {"embed": embed, "block": block, "head": head, "num_blocks": 3, "init": init_parts} | changes
    return js.Stacked(**parts)


def batch(rows=16):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, 5)).astype(np.float32), "y": rng.normal(size=(rows, 3)).astype(np.float32)}


def test_blocks_are_stacked_and_drawn_apart():
    params = model_of().init(jax.random.key(0))
    assert jax.tree.map(jnp.shape, params) == {
        "embed": (5, 6),
        "blocks": {"w": (3, 6, 6), "b": (3, 6)},
        "head": {"out": (6, 3)},
    }
    assert len(np.unique(np.asarray(params["blocks"]["w"]).reshape(3, -1), axis=0)) == 3


def test_the_loss_is_that_of_a_loop_over_blocks():
    model = model_of()
    params = model.init(jax.random.key(1))
    x = batch()["x"] @ params["embed"]
    for i in range(3):
        x = block(jax.tree.map(lambda p, i=i: p[i], params["blocks"]), x, None)
    expected = head({"embed": 0, "head": params["head"]}, x, batch(), None).value
    assert float(model.loss(params, batch(), None).value) == pytest.approx(float(expected), rel=1e-6)


def test_evaluation_has_no_keys_and_the_heads_metrics():
    def with_metrics(params, x, batch, key):
        assert key is None
        return js.Loss(head(params, x, batch, key), metrics={"rows": js.Sum(len(x))})

    results = model_of(head=with_metrics).evaluate(model_of().init(jax.random.key(0)), batch())
    assert set(results) == {"loss", "rows"} and isinstance(results["loss"], js.Mean)


def test_every_call_has_a_key_of_its_own():
    """Embedding, three blocks and head: five different keys, and others in the next step."""
    seen = []

    def note(key):
        jax.debug.callback(lambda data: seen.append(tuple(map(int, data))), jax.random.key_data(key))

    def noting_embed(params, batch, key):
        note(key)
        return embed(params, batch, key)

    def noting_block(params, x, key):
        note(key)
        return block(params, x, key)

    def noting_head(params, x, batch, key):
        note(key)
        return head(params, x, batch, key)

    model = model_of(embed=noting_embed, block=noting_block, head=noting_head)
    params = model.init(jax.random.key(0))
    for step in range(2):
        model.loss(params, batch(), jax.random.fold_in(jax.random.key(0), step)).value.block_until_ready()
    jax.effects_barrier()
    assert len(seen) == len(set(seen)) == 10


@pytest.mark.slow
def test_one_block_and_shared_embedding():
    """Losses within 1e-6 and gradients within 1e-5 of one device; the head reads the embedding, so both add up."""

    def tied(params, x, batch, key):
        error = jnp.square(x @ params["embed"].T)
        return js.Mean(error.sum(), error.size)

    model = model_of(head=tied, num_blocks=1)
    toy = Toy(model.init, model.loss, batch(), rate=1e-3)
    trace, _ = sharded(toy, js.fsdp(min_size=0), js.make_mesh(data=8), js.explicit())
    assert_equal_runs(trace, one_device(toy))


def gathers(loss_fn, model, **options) -> int:
    """How often a step gathers, turns of loops counted."""
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), model.init, TX)
    compiled = js.make_step(loss_fn, TX, layout, engine=js.explicit(**options)).compile(batch())
    found = collectives(compiled, layout.mesh)
    return sum(one.count for one in found if one.kind == "all-gather")


@pytest.mark.parametrize(
    ("remat", "backward"), [("everything", 1), ("nothing", 2), pytest.param("dots", 2, marks=pytest.mark.slow)]
)
def test_weights_are_gathered_in_every_turn_of_the_loop_forward_and_backward(remat, backward):
    """The embedding and the head once; of each of 3 blocks two weights forward, and backward those that it needs."""
    model = model_of()
    assert gathers(model.loss, model, remat=remat) == 2 + 3 * (2 + backward)


# Bad input.


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_no_blocks(num_blocks):
    with pytest.raises(ValueError, match=f"Stacked: num_blocks must be at least 1, got {num_blocks}"):
        model_of(num_blocks=num_blocks)


@pytest.mark.parametrize(
    ("parts", "got"),
    [
        ({"embed": jnp.zeros(1)}, r"\['embed'\]"),
        ({"block": jnp.zeros(1), "blocks": jnp.zeros(1)}, r"\['block', 'blocks'\]"),
        ((jnp.zeros(1),), "tuple"),
    ],
)
def test_parts_without_a_block(parts, got):
    with pytest.raises(ValueError, match=f'init must return a dict with "block" and without "blocks", got {got}'):
        model_of(init=lambda key: parts).init(jax.random.key(0))


def test_a_layout_that_does_not_know_the_model():
    model = model_of(num_blocks=8)
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def unknown(key):
        return jax.tree.map(lambda x: jax.random.normal(key, x.shape), shapes)

    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), unknown, TX)
    message = r"(?s)pass the method model.init itself to js.layout.*blocks/.*: dim 0 of \[8, .*\] is split or padded"
    with pytest.raises(ValueError, match=message):
        js.make_step(model.loss, TX, layout)
    with pytest.raises(ValueError, match='the layout has no "blocks": make it with the init method'):
        js.make_step(model.loss, TX, js.layout(js.ddp(), js.make_mesh(data=8), lambda key: {"w": jnp.zeros(3)}, TX))


@pytest.mark.parametrize("wrong", [lambda x: x[:, :3], lambda x: x.astype(jnp.bfloat16), lambda x: (x, x)])
def test_a_block_that_changes_its_activations(wrong):
    model = model_of(block=lambda params, x, key: wrong(block(params, x, key)))
    with pytest.raises(
        ValueError, match=r"(?s)block must return what it receives; keep shapes and dtypes.*float32\[16, 6\]"
    ):
        model.loss(model.init(jax.random.key(0)), batch(), None)
