"""The common circular GPipe of SPMD libraries, written for comparison: a scan over iterations, turned by autodiff.

All stages compute at once: a stage axis, split over `pipe`, is mapped with `vmap`, and what each stage made is rolled
to the next one, which the compiler turns into a collective permute. An iteration is the body of a `lax.scan`; m
micro-batches through p stages that hold v repeats of their layers take m v + p - 1 of them, and autodiff turns the scan
around. The design is that of praxis (`LayerwiseShardablePipelined`, `CircularLayerwiseShardablePipelined`) and of
MaxText (`layers/pipeline.py`), and so are these choices, MaxText's defaults:

- Model stage r p + s is repeat r of device s; a device holds v runs of l = L / (p v) layers, parameters [v, p, l, ...].
- Inputs rest split over the stages by micro-batch, in a buffer that moves one stage towards the first with every use;
  outputs move into the places that become free (praxis: `stream_io`).
- What the last stage made waits in a buffer of m micro-batches until the first one is free for the next repeat
  (MaxText: `circ_storage`), unless m = p, where it is passed on at once.
- An iteration is under `jax.checkpoint` with `save_only_these_names("iteration_input", "decoder_layer_input")`: all
  that a layer computes is computed again in the backward pass (MaxText: `remat_policy: full`).
- Embedding and loss stand outside the loop, on all micro-batches at once, their rows split over `pipe` and `data`.

What it leaves out of MaxText's: FSDP inside stages, delayed forwarding, offloading.

Shape suffixes: S stages, Q = M / S micro-batches per stage, M micro-batches, B rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.loss import as_loss
from jaxshard.core.types import PyTree

PIPE, DATA = "pipe", "data"

SAVED = ("iteration_input", "decoder_layer_input")


def fold(params: PyTree, stages: int, repeats: int) -> PyTree:
    """Parameters with the blocks [L, ...] as [repeats, stages, the rest, ...]; layers keep their order."""

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(repeats, stages, -1, *x.shape[1:])

    return params | {"blocks": jax.tree.map(split, params["blocks"])}


def unfold(params: PyTree) -> PyTree:
    """The blocks as [L, ...] again."""
    return params | {"blocks": jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), params["blocks"])}


def shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """Where folded parameters, or an optimizer state of them, rest: blocks split by stage, all else whole."""

    def place(path: tuple[Any, ...], _: Any) -> NamedSharding:
        in_blocks = any(getattr(key, "key", None) == "blocks" for key in path)
        return NamedSharding(mesh, PartitionSpec(None, PIPE) if in_blocks else PartitionSpec())

    return jax.tree_util.tree_map_with_path(place, tree)


def make_loss(
    model: Stacked, mesh: Mesh, *, microbatches: int, repeats: int = 1, compute_dtype: Any = None
) -> Callable[..., jax.Array]:
    """`loss(params, batch, key)`, the model's loss with folded parameters: a scalar.

    Nothing is dropped: `key` goes to the head alone. Rows of a batch are taken in order, micro-batch by micro-batch.
    Weights are cast to `compute_dtype` where they are used, so that their gradients add up in their own.
    """
    stages = mesh.shape[PIPE]
    if microbatches % stages or model.num_blocks % (stages * repeats):
        raise ValueError(
            f"{microbatches} micro-batches and {model.num_blocks} blocks do not divide into {stages} stages with "
            f"{repeats} repeats"
        )
    waits = repeats > 1 and microbatches > stages
    iterations = microbatches * repeats + stages - 1

    def held(x: jax.Array, *axes: str | None) -> jax.Array:
        names = (axis if axis in mesh.axis_names else None for axis in axes)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*names)))

    def cast(tree: PyTree) -> PyTree:
        return tree if compute_dtype is None else jax.tree.map(lambda x: x.astype(compute_dtype), tree)

    def stage(layers: PyTree, x_B: jax.Array) -> jax.Array:
        depth = jax.tree.leaves(layers)[0].shape[0]
        for number in range(depth):
            x_B = checkpoint_name(x_B, "decoder_layer_input")
            x_B = model.block(jax.tree.map(lambda x, n=number: x[n], layers), x_B, None)
        return x_B

    all_stages = jax.vmap(stage, spmd_axis_name=PIPE)

    def weights(blocks: PyTree, iteration: jax.Array) -> PyTree:
        """[S, l, ...]: of every stage the layers of the repeat at which it is."""
        if repeats == 1:
            return jax.tree.map(lambda x: x[0], blocks)
        ids_S = held(jnp.maximum(iteration - jnp.arange(stages), 0) // microbatches, PIPE)
        take = jax.vmap(lambda x, i: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), in_axes=(1, 0))
        return jax.tree.map(lambda x: held(take(x, ids_S), PIPE), blocks)

    def run(blocks: PyTree, x_SQB: jax.Array) -> jax.Array:
        """The output of the last block of what enters the first, micro-batch s Q + q at [s, q] on both sides."""
        per_stage = x_SQB.shape[1]
        number_S = jnp.arange(stages).reshape(-1, *(1,) * (x_SQB.ndim - 2))

        def body(carry: tuple[jax.Array, ...], iteration: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
            x_SQB, shift_SB, waiting_SMB = carry
            slot = iteration % per_stage
            entering_SB = jax.lax.dynamic_index_in_dim(x_SQB, slot, 1, keepdims=False)
            again_SB = shift_SB
            if waits:
                again_SB = jax.lax.dynamic_index_in_dim(waiting_SMB, iteration % microbatches, 1, keepdims=False)
            first_SB = jnp.where(iteration < microbatches, entering_SB, again_SB)
            in_SB = held(jnp.where(number_S == 0, first_SB, shift_SB), PIPE, DATA)
            in_SB = checkpoint_name(in_SB, "iteration_input")
            out_SB = held(all_stages(cast(weights(blocks, iteration)), in_SB), PIPE, DATA)
            shift_SB = held(jnp.roll(out_SB, 1, 0), PIPE, DATA)
            if waits:
                done = (iteration - (stages - 1)) % microbatches
                waiting_SMB = jax.lax.dynamic_update_index_in_dim(waiting_SMB, shift_SB, done, 1)
            moved_SB = jnp.where(number_S == stages - 1, out_SB, jnp.roll(entering_SB, -1, 0))
            x_SQB = jax.lax.dynamic_update_index_in_dim(x_SQB, held(moved_SB, PIPE, DATA), slot, 1)
            return (held(x_SQB, PIPE, None, DATA), shift_SB, waiting_SMB), None

        body = jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*SAVED), prevent_cse=False)
        shift_SB = held(jnp.zeros_like(x_SQB[:, 0]), PIPE, DATA)
        room = microbatches if waits else 0
        waiting_SMB = held(jnp.zeros((stages, room, *x_SQB.shape[2:]), x_SQB.dtype), PIPE, None, DATA)
        (x_SQB, _, _), _ = jax.lax.scan(body, (x_SQB, shift_SB, waiting_SMB), jnp.arange(iterations))
        # The first result came out p - 1 slots after the first micro-batch went in.
        return jnp.roll(x_SQB, 1 - stages, 1)

    def loss(params: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        rest = cast({name: part for name, part in params.items() if name != "blocks"})

        def split(x: jax.Array) -> jax.Array:
            return held(x.reshape(stages, microbatches // stages, -1, *x.shape[1:]), PIPE, None, DATA)

        batch = jax.tree.map(split, batch)

        def ends(x_B: jax.Array, batch: PyTree) -> tuple[jax.Array, jax.Array]:
            mean = as_loss(model.head(rest, x_B, batch, key)).value
            (total,), (weight,) = mean.totals, mean.weights
            return total, weight

        def mapped(fn: Callable) -> Callable:
            return jax.vmap(jax.vmap(fn), spmd_axis_name=PIPE)

        x_SQB = held(mapped(lambda batch: model.embed(rest, batch, None))(batch), PIPE, None, DATA)
        x_SQB = run(params["blocks"], x_SQB)
        total, weight = mapped(ends)(held(x_SQB, PIPE, None, DATA), batch)
        return total.sum() / weight.sum()

    return loss


def make_step(
    model: Stacked,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    microbatches: int,
    repeats: int = 1,
    compute_dtype: Any = None,
) -> jax.stages.Wrapped:
    """The jitted step `step(params, opt_state, batch, key) -> (params, opt_state, metrics)` on folded parameters."""
    loss_fn = make_loss(model, mesh, microbatches=microbatches, repeats=repeats, compute_dtype=compute_dtype)

    def update(params: PyTree, opt_state: PyTree, batch: PyTree, key: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.global_norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    params, opt_state = shapes(model, tx, mesh, repeats)
    rests = shardings(mesh, params), shardings(mesh, opt_state)
    whole = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(tuple(axis for axis in (PIPE, DATA) if axis in mesh.axis_names)))
    return jax.jit(update, in_shardings=(*rests, rows, whole), out_shardings=(*rests, whole), donate_argnums=(0, 1))


def shapes(model: Stacked, tx: optax.GradientTransformation, mesh: Mesh, repeats: int) -> tuple[PyTree, PyTree]:
    """The shapes of the folded parameters and of their optimizer state."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda key: fold(model.init(key), mesh.shape[PIPE], repeats), key)
    return params, jax.eval_shape(tx.init, params)
