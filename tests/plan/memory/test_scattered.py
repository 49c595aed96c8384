"""Gradients of an element per row, as of the label's logit: selections, or scatters into arrays in memory."""

import jax
import jax.numpy as jnp
import pytest

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.order import join_scatters
from jaxshard.plan.memory.roles import temporary_bytes

WIDTH, VOCAB = 64, 4096


def label_loss(x, w, labels):
    logits = (x @ w).astype(jnp.float32)
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - own).mean()


def gradient(rows, positions, stacks_first=False):
    args = (
        jax.ShapeDtypeStruct((rows, positions, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((WIDTH, VOCAB), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, positions), jnp.int32),
    )
    closed = jax.make_jaxpr(jax.grad(label_loss, argnums=(0, 1)))(*args)
    region = build(closed, [(((),) * len(one.shape), "batch", "") for one in args], {})
    join_scatters(region)
    found = Liveness(
        region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs),
        narrow_products=True, stacks_first=stacks_first,
    )  # fmt: skip
    (scatter,) = [op for op in region.ops if op.name.startswith("scatter")]
    return found, scatter


def test_with_several_rows_the_gradient_is_a_selection_that_products_compute_in_bf16():
    found, scatter = gradient(2, 256)
    stored = [found.stored_bytes(one) for one in found.stored if one.shard == (2, 256, VOCAB)]
    assert max(stored) == 2 * 512 * VOCAB
    assert found._extra(scatter) == []


@pytest.mark.parametrize(("positions", "bytes_after", "beside"), [(512, 4, 0), (1024, 2, 2)])
def test_along_an_only_row_it_is_scattered_in_f32_and_from_a_tile_of_elements_on_in_one_dimension(
    positions, bytes_after, beside
):
    found, scatter = gradient(1, positions)
    (made,) = scatter.outs
    assert made in found.stored
    assert found.stored_bytes(made) == bytes_after * positions * VOCAB
    assert sum(one.bytes for one in found._extra(scatter)) == beside * positions * VOCAB


def test_where_gathers_run_beside_both_arrays_of_such_a_scatter_are_there_from_the_start():
    found, scatter = gradient(1, 1024, stacks_first=True)
    assert sum(one.bytes for one in found._extra(scatter)) == 2 * 4 * 1024 * VOCAB


@pytest.mark.parametrize(
    ("dtype", "columns", "rows", "kept"),
    [
        ("float32", ("tensor",), (), True),
        ("float32", (), (), False),
        ("bfloat16", ("tensor",), (), False),
        ("float32", (), ("tensor",), True),
    ],
)
def test_f32_logits_wait_for_the_labels_own_where_the_vocabulary_is_split_or_all_rows_but_one(
    dtype, columns, rows, kept
):
    # The devices' parts are summed for the loss alone; a copy in a wider type is read early, since that frees it.
    args = (
        jax.ShapeDtypeStruct((8, 256, WIDTH), dtype),
        jax.ShapeDtypeStruct((WIDTH, VOCAB), dtype),
        jax.ShapeDtypeStruct((8, 256), jnp.int32),
    )
    closed = jax.make_jaxpr(jax.value_and_grad(label_loss, argnums=(0, 1)))(*args)
    splits = (rows, (), ()), ((), columns), (rows, ())
    region = build(closed, [(split, "batch" if rows else "", "") for split in splits], {"tensor": 8})
    join_scatters(region)
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    (gather,) = [op for op in region.ops if op.name == "gather" and op.ins[0].shape[-1] == VOCAB]
    assert (found.last[found.find(gather.ins[0])] == len(found.ops) - 1) == kept
