"""Silent faults as they were published, each a step before and after: own code, with the trait of the fault alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tests.plan.guard.programs import (
    DEPTH,
    ROWS,
    VOCAB,
    WIDTH,
    Made,
    Spec,
    constrain,
    dense_loss,
    layers,
    manual_step,
    mesh_of,
    place,
    replicated,
    rows,
    rows_split,
    step_of,
)

Make = Callable[[Sequence[Any]], Made]


class Fault(NamedTuple):
    """A program before and after, and the sentence that names the change; "..." stands for what compilers differ in.

    A topology is given where CPUs do not show the fault.
    """

    good: Make
    bad: Make
    sentence: str
    topology: str | None = None


def split_but_embedding(x: Any) -> P:
    return P() if VOCAB in x.shape else rows_split(x)


def stored(params_spec: Spec, opt_spec: Spec, **options: Any) -> Make:
    return lambda devices: step_of(mesh_of(devices, data=len(devices)), params_spec, opt_spec, **options)


# Collectives by hand


def accumulated(*, each: bool) -> Make:
    """Sum gradients over four micro-batches, and over devices after the loop, or in each iteration."""

    def gradients(params: Any, x: Any, y: Any) -> Any:
        def add(sums: Any, part: Any) -> Any:
            grads = jax.grad(dense_loss)(params, *part)
            return jax.tree.map(jnp.add, sums, lax.psum(grads, "data") if each else grads), None

        parts = [a.reshape(2, -1, WIDTH) for a in (x, y)]
        sums, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        return sums if each else lax.psum(sums, "data")

    return lambda devices: manual_step(mesh_of(devices, data=len(devices)), gradients, P())


def fully_sharded(loss: Callable[..., Any] = dense_loss, *, scatter: bool = True, dtype: Any = None) -> Make:
    """Gather weights that are stored split, in `dtype`, and scatter the sums of their gradients."""

    def gradients(params: Any, x: Any, y: Any) -> Any:
        def whole(params: Any) -> Any:
            cast = params if dtype is None else jax.tree.map(lambda p: p.astype(dtype), params)
            return jax.tree.map(lambda p: lax.all_gather(p, "data", tiled=True), cast)

        if scatter:
            return jax.grad(lambda params: loss(whole(params), x, y))(params)
        sums = lax.psum(jax.grad(loss)(whole(params), x, y), "data")
        at = lax.axis_index("data")
        return jax.tree.map(lambda g, p: lax.dynamic_slice_in_dim(g, at * len(p), len(p)), sums, params)

    return lambda devices: manual_step(mesh_of(devices, data=len(devices)), gradients, P("data"))


def gathered_in_each_layer(*, again: bool) -> Make:
    """Gather each weight of a loop where it is used; the backward pass gathers it again, or uses what was kept."""
    policy = None if again else jax.checkpoint_policies.save_only_these_names("gathered")

    def gradients(params: Any, x: Any, y: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            full = checkpoint_name(lax.all_gather(w, "data", tiled=True), "gathered")
            return jnp.tanh(x @ full), None

        def loss(params: Any) -> Any:
            h, _ = lax.scan(jax.checkpoint(layer, policy=policy), x, params["stack"])
            return jnp.square(h - y).mean()

        return jax.grad(loss)(params)

    def make(devices: Sequence[Any]) -> Made:
        stack = {"stack": jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), jnp.float32)}
        return manual_step(mesh_of(devices, data=len(devices)), gradients, P(None, "data"), params=stack)

    return make


def summed_over(*axes: str) -> Make:
    """Sum gradients over mesh axes of which both split the batch."""

    def gradients(params: Any, x: Any, y: Any) -> Any:
        return lax.psum(jax.grad(dense_loss)(params, x, y), axes)

    return lambda devices: manual_step(mesh_of(devices, replica=2, data=len(devices) // 2), gradients, P())


# Constraints, that the partitioner completes


def tensor_parallel(down: P) -> Make:
    """Two products whose hidden activation is split over `model`, as long as the second weight is split as well."""
    params = {"up": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32)}
    params |= {"down": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.square(jnp.tanh(x @ params["up"]) @ params["down"] - y).mean()

    def make(devices: Sequence[Any]) -> Made:
        specs = {(WIDTH, 4 * WIDTH): P(None, "model"), (4 * WIDTH, WIDTH): down}
        mesh = mesh_of(devices, data=2, model=len(devices) // 2)
        spec = lambda x: specs.get(x.shape, P())  # noqa: E731
        return step_of(mesh, spec, spec, loss=loss, params=params, batch=rows())

    return make


def head(logits: P) -> Make:
    """A classifier whose logits are split over the vocabulary, or gathered by a wrong constraint."""

    def make(devices: Sequence[Any]) -> Made:
        mesh = mesh_of(devices, data=2, model=len(devices) // 2)

        def loss(params: Any, x: Any, y: Any) -> Any:
            found = constrain(mesh, x @ params["head"], lambda x: logits)
            return -jnp.mean(jnp.sum(jax.nn.log_softmax(found) * jax.nn.one_hot(y, VOCAB), -1))

        batch = (rows()[0], jax.ShapeDtypeStruct((ROWS,), jnp.int32))
        params = {"head": jax.ShapeDtypeStruct((WIDTH, VOCAB), jnp.float32)}
        spec = lambda x: P(None, "model") if x.ndim else P()  # noqa: E731
        return step_of(mesh, spec, spec, loss=loss, params=params, batch=batch)

    return make


# One device's work


def blocks(*, scan: bool = True, remat: bool = True) -> Make:
    """A stack of layers with activations of many rows: in a loop or unrolled, with remat or without."""
    stack = {"stack": jax.ShapeDtypeStruct((8, WIDTH, WIDTH), jnp.float32)}
    many = jax.ShapeDtypeStruct((64 * ROWS, WIDTH), jnp.float32)

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.sin(jnp.tanh(x @ w)) @ w.T), None

    def loss(params: Any, x: Any, y: Any) -> Any:
        body = jax.checkpoint(layer) if remat else layer
        if scan:
            x, _ = lax.scan(body, x, params["stack"])
        else:
            for w in params["stack"]:
                x, _ = body(x, w)
        return jnp.square(x - y).mean()

    return stored(replicated, replicated, loss=loss, params=stack, batch=(many, many))


def called_with(*scales: Any) -> Make:
    """A step that takes a number; a Python number and an array of one differ in their weak type."""

    def make(devices: Sequence[Any]) -> Made:
        mesh = mesh_of(devices, data=len(devices))

        def step(params: Any, x: Any, y: Any, scale: Any) -> Any:
            return jax.tree.map(lambda p, g: p - scale * g, params, jax.grad(dense_loss)(params, x, y))

        arguments = (place(mesh, layers(), replicated), *place(mesh, rows(), rows_split))
        return jax.jit(step), *((*arguments, scale) for scale in scales)

    return make


ONE, TPU = jnp.float32(1), "v5e:2x4"
ALL = {
    # The option was read by another code path: https://github.com/AI-Hypercomputer/maxtext/pull/5104
    "zero-1 that became a no-op": Fault(
        stored(replicated, rows_split),
        stored(replicated, replicated),
        "10 of the moments of the optimizer, f32[512,64], f32[64,64], stored replicated, 393.22 kB on each device, "
        "where stored split over data (dimension 0), 49.15 kB: opt_state[0].mu['embed']",
    ),
    # https://github.com/AI-Hypercomputer/maxtext/pull/5099, https://github.com/pytorch/xla/issues/5760
    "an all-reduce in each micro-batch": Fault(
        accumulated(each=False),
        accumulated(each=True),
        "gradients f32[64,64] (8 times) are all-reduced over data, 131.07 kB, instead of 4 times",
    ),
    # A rule that matches no path: EasyDeL's embeddings
    "a replicated embedding": Fault(
        stored(rows_split, rows_split),
        stored(split_but_embedding, split_but_embedding),
        "1 of the parameters, f32[512,64], stored replicated, 131.07 kB on each device, where stored split over data "
        "(dimension 0), 16.38 kB: params['embed']",
    ),
    # Flax's example lm1b: every parameter is replicated, and no weight is gathered
    "fsdp that gathers no weight": Fault(
        stored(rows_split, rows_split),
        stored(replicated, replicated),
        "weights f32[64,64] (4 times) are no longer all-gathered over data, 65.54 kB before",
    ),
    "a remat that was lost": Fault(
        blocks(),
        blocks(remat=False),
        "peak memory: 2... MB instead of 1.05 MB",
    ),
    # https://github.com/jax-ml/jax/issues/25010
    "weights that are gathered again in the backward pass": Fault(
        gathered_in_each_layer(again=False),
        gathered_in_each_layer(again=True),
        "weights f32[64,64] (8 times) are all-gathered over data, 131.07 kB, instead of 4 times",
    ),
    "collectives in f32 instead of bf16": Fault(
        fully_sharded(dtype=jnp.bfloat16),
        fully_sharded(),
        "gradients f32[64,64] (4 times) are all-reduced over data, 65.54 kB, where they were bf16[64,64]",
        TPU,
    ),
    "a reduce-scatter that became an all-reduce": Fault(
        fully_sharded(),
        fully_sharded(scatter=False),
        "gradients f32[64,64] (4 times) are all-reduced over data, 65.54 kB, where they were reduce-scattered",
    ),
    "a batch that is no longer split": Fault(
        stored(replicated, replicated),
        stored(replicated, replicated, batch_spec=replicated),
        "gradients f32[512,64], f32[64,64] (6 times) are no longer all-reduced over data",
    ),
    "layers that are unrolled": Fault(
        blocks(),
        blocks(scan=False),
        "instructions of the compiled program: 6... instead of 2...",
    ),
    # https://github.com/google-deepmind/mujoco/issues/2306
    "a step that compiles twice": Fault(
        called_with(ONE, ONE),
        called_with(1.0, ONE),
        "programs that JAX compiles: 2 instead of 1",
    ),
    "an activation that is gathered": Fault(
        tensor_parallel(P("model")),
        tensor_parallel(P(None, "model")),
        "activations f32[8,256] (once) are all-gathered over model, 8.19 kB, which they were not before",
    ),
    "logits that every device has in full": Fault(
        head(P("data", "model")),
        head(P("data")),
        "weights f32[64,512] (once) are all-gathered over model, 131.07 kB, which they were not before",
    ),
    "a loss that is computed twice": Fault(
        stored(replicated, replicated),
        stored(replicated, replicated, again=True),
        "FLOPs of products: 50,331,648 instead of 37,748,736",
    ),
    "gradients that are summed over one of two axes": Fault(
        summed_over("replica", "data"),
        summed_over("data"),
        "gradients f32[64,64] (4 times) are all-reduced over data, 65.54 kB, where it was over replica+data",
    ),
}
