"""What stacking changes: found for every transform that it changes, for none that it does not, cured by per_block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from optax import contrib

import jaxshard as js
from jaxshard import optim
from tests.optim.test_per_block import BLOCKS, unstacked
from tests.toys import CLASSES, Toy, classes, cross_entropy, one_device, recording, sharded, start_of, tree_error, worst

pytestmark = [pytest.mark.fast_cases(1), pytest.mark.usefixtures("compiled_quickly")]


def shapes(width: int = 4) -> Any:
    """Of a model with its 3 blocks stacked."""

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    return {
        "embed": array(5, width),
        "blocks": {"dense": {"kernel": array(3, width, 2 * width), "bias": array(3, 2 * width)}, "scale": array(3)},
        "head": array(width, 5),
    }


def kernels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: path[-1].key == "kernel", params)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def clipped(*rest: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), *rest)


class Multi:
    """What `optax.MultiSteps` is, as a transform."""

    def __new__(cls, tx: Any, every: int) -> Any:
        return optax.MultiSteps(tx, every).gradient_transformation()


UNCHANGED = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "adamw with a schedule": lambda: optax.adamw(optax.linear_schedule(1.0, 0.0, 9), weight_decay=0.1),
    "global norm, adamw": lambda: clipped(optax.adamw(0.1)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "multi_steps": lambda: Multi(clipped(optax.adam(0.1)), 3),
    "prodigy": lambda: contrib.prodigy(),
    "mask by path": lambda: optax.adamw(0.1, weight_decay=0.1, mask=kernels),
    "mask as a tree": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(optax.sgd(0.1), kernels(shapes()))
    ),
    "labels as a tree": lambda: optax.partition({True: optax.adam(0.1), False: optax.sgd(1.0)}, kernels(shapes())),
    "lamb elsewhere": lambda: optax.masked(
        optax.lamb(0.1), lambda p: jax.tree_util.tree_map_with_path(lambda path, x: path[0].key == "embed", p)
    ),
    "stochastic_round": lambda: optim.stochastic_round(optax.adam(0.1)),
    "per_block": lambda: clipped(optim.per_block(optax.lamb(0.1))),
    "per_block, factored": lambda: optim.per_block(optax.adafactor(0.1, min_dim_size_to_factor=4)),
    "per_block in multi_steps": lambda: Multi(optim.per_block(contrib.muon(0.1)), 2),
    "multi_steps in per_block": lambda: optim.per_block(Multi(contrib.muon(0.1), 2)),
}

CHANGED = {
    "clip_by_block_rms": lambda: optax.adafactor(0.1),
    "scale_by_muon": lambda: contrib.muon(0.1),
    "scale_by_trust_ratio": lambda: optax.lamb(0.1),
    "factorized": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4, clipping_threshold=None),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "scale_by_novograd": lambda: optax.novograd(0.1),
    "add_decayed_weights": lambda: clipped(optax.adamw(0.1, weight_decay=0.1, mask=matrices)),
    "MultiSteps": lambda: Multi(optax.lamb(0.1), 30),
    "scale_by_trust_ratio  ": lambda: optax.partition(
        {True: optax.lamb(0.1), False: optax.sgd(1.0)}, kernels(shapes())
    ),
    "add_noise": lambda: optax.noisy_sgd(0.1, key=0),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_what_stacking_leaves_alone(name: str) -> None:
    assert optim.stacking_changes(UNCHANGED[name](), shapes()) == ()


@pytest.mark.parametrize("name", CHANGED)
def test_what_stacking_changes_is_found_by_name(name: str) -> None:
    reasons = optim.stacking_changes(CHANGED[name](), shapes())
    assert reasons and all(name.strip() in str(reason) for reason in reasons)


def test_the_leaves_are_named_and_only_those() -> None:
    labels = kernels(shapes())
    reasons = optim.stacking_changes(optax.partition({True: optax.lamb(0.1), False: optax.sgd(1.0)}, labels), shapes())
    assert [reason.output for reason in reasons] == ["update blocks/dense/kernel"]


def test_thresholds_on_sizes_are_those_of_the_real_shapes() -> None:
    """Adafactor without norms: elementwise below 128, factored, which tiny arrays can't show, from there on."""
    tx = optax.adafactor(0.1, clipping_threshold=None, multiply_by_parameter_scale=False)
    assert optim.stacking_changes(tx, shapes(64)) == ()
    assert "at other shapes" in str(optim.stacking_changes(tx, shapes(128))[0])


def test_a_transform_that_cannot_read_single_blocks() -> None:
    def by_rank(params: Any) -> Any:
        return jax.tree.map(
            lambda x: x.shape[2] > 0 if x.ndim == 3 else x.shape[1] > 0 if x.ndim == 2 else True, params
        )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        kernel = updates["blocks"]["dense"]["kernel"]
        total = jnp.einsum("abc->", kernel)
        return jax.tree.map(lambda u: u * total, updates), state

    assert optim.stacking_changes(optax.masked(optax.sgd(0.1), by_rank), shapes()) == ()
    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    assert "cannot be compared with the unstacked model" in str(optim.stacking_changes(tx, shapes())[0])


def norm_each() -> Any:
    """Divides every array by a function of its own norm, without a look at its size."""
    return optax.stateless(lambda updates, _: jax.tree.map(lambda x: x / (1 + jnp.sqrt(jnp.sum(x**2))), updates))


def norm_of_either() -> Any:
    """Divides by the sum of some arrays or by that of the others: together they are all, but no sum is over all."""

    def update(updates: Any, _: Any) -> Any:
        first, *rest = jax.tree.leaves(updates)
        one = jax.lax.cond(jnp.int32(1) > 0, lambda: jnp.sum(first), lambda: sum(map(jnp.sum, rest)))
        return jax.tree.map(lambda x: x / (1 + one**2), updates)

    return optax.stateless(update)


@pytest.mark.parametrize("tx", [norm_of_either(), clipped(norm_each()), clipped(optax.novograd(0.1))])
def test_a_sum_over_one_array_is_no_total_because_all_arrays_influence_it(tx: Any) -> None:
    """After clipping by the global norm every gradient depends on all; its own norm is still its own."""
    assert optim.stacking_changes(tx, shapes())


def test_nothing_is_stacked() -> None:
    assert optim.stacking_changes(optax.lamb(0.1), {"w": jnp.ones((3, 2))}) == ()
    assert optim.stacking_changes(optax.lamb(0.1), shapes(), "layers") == ()


# A model that js.stack stacked.


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(nn.Dense(16)(x))


def loss(model: Any, batch: Any) -> Any:
    return cross_entropy(model.head(model.blocks(model.embed(batch["x"]))), batch)


def stacked_model() -> Any:
    return js.stack(Block(), BLOCKS, loss, classes(), embed=nn.Dense(16), head=nn.Dense(CLASSES))


def in_a_list(model: Any) -> Toy:
    """The model that was not stacked, with the same start."""

    def loss_fn(params: Any, batch: Any, key: Any) -> js.Mean:
        x = nn.Dense(16).apply({"params": params["embed"]}, batch["x"])
        for block in params["blocks"]:
            x = Block().apply({"params": block}, x)
        return cross_entropy(nn.Dense(CLASSES).apply({"params": params["head"]}, x), batch)

    start = unstacked(start_of(model.init))
    return Toy(lambda key: start, loss_fn, classes())


def test_make_step_refuses_what_stacking_changes() -> None:
    model, tx = stacked_model(), optax.lamb(0.1)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), model.init, tx)
    with pytest.raises(
        ValueError, match=r"(?s)were stacked.*scale_by_trust_ratio at .*Wrap it in js.optim.per_block\(tx\)"
    ):
        js.make_step(model.loss, tx, layout)
    by_hand = js.Stacked(model.embed, model.block, model.head, BLOCKS, model.parts.init)
    js.make_step(by_hand.loss, tx, js.layout(js.fsdp(), js.make_mesh(data=8), by_hand.init, tx))


PER_BLOCK = {
    "muon": lambda: contrib.muon(0.02),
    "lamb": lambda: optax.lamb(0.01),
    "lars": lambda: optax.lars(0.1),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    "scale_by_trust_ratio   ": lambda: optim.stochastic_round(optax.lamb(0.1)),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.001), optax.sgd(0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PER_BLOCK)
def test_with_per_block_a_pipeline_trains_the_unstacked_model(name: str) -> None:
    """The same, 3 blocks on 2 stages."""
    strategy = js.compose(js.fsdp(min_size=0), js.pipeline(chunks=1))
    engine = js.pipelined(microbatches=4, schedule="one_f_one_b")
    assert_trains_alike(PER_BLOCK[name](), strategy, js.make_mesh(data=4, pipe=2), engine)


def assert_trains_alike(tx: Any, strategy: Any, mesh: Any, engine: Any) -> None:
    model = stacked_model()
    expected = one_device(in_a_list(model), tx, steps=3)
    toy = Toy(model.init, model.loss, classes())
    trace, _ = sharded(toy, strategy, mesh, engine, recording(optim.per_block(tx)), steps=3)
    assert worst(abs(a - b) / b for a, b in zip(trace.losses, expected.losses, strict=True)) < 1e-5
    for one, other in zip((*trace.grads, trace.params), (*expected.grads, expected.params), strict=True):
        assert tree_error(unstacked(one), other) < 1e-4
