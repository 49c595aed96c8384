"""A small model, runs of it that are made without a program, and the bytes that a transfer can't avoid."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js
from jaxshard.training.state import run_arrays

PyTree = Any
TX = optax.sgd(0.1, momentum=0.9)
DEPTH = 5
"""Blocks: odd, so that a pipeline pads them."""


def init(key):
    """Matrices, a vector that no two devices divide, and floats of 16 bits; a run has scalars besides."""
    block = {"w": jnp.zeros((8, 4), jnp.bfloat16), "b": jnp.zeros(3)}
    return {"table": jnp.zeros((16, 8)), "block": block}


MODEL = js.Stacked(lambda p, b, k: b, lambda p, x, k: x, lambda p, x, b, k: js.Mean(x.sum(), x.size), DEPTH, init)
"""Never run: its layouts and parameters are what moves."""


RULES = [("table", ("vocab", "embed")), ("w", ("embed", "mlp")), ("*", "whole"), *js.RULES]


def make_layout(name, first=0, tx=TX):
    """A layout over eight devices or fewer, from the device with this number on, around the end."""
    devices = [jax.devices()[(first + number) % 8] for number in range(8)]
    strategy, axes = {
        "one": (js.ddp("data"), {"data": 1}),
        "ddp": (js.ddp("data"), {"data": 4}),
        "zero1": (js.zero1("data", min_size=0), {"data": 8}),
        "zero2": (js.zero2("data", min_size=0), {"data": 2}),
        "fsdp": (js.fsdp("data", min_size=0), {"data": 4}),
        "wide": (js.fsdp("data", min_size=0), {"data": 8}),
        "hsdp": (js.hsdp("replica", "data", min_size=0), {"replica": 2, "data": 3}),
        "tensor": (js.compose(js.batch("data"), js.tensor(RULES)), {"data": 1, "tensor": 4}),
        "pipe": (js.compose(js.fsdp("data", min_size=0), js.pipeline(chunks=2)), {"data": 2, "pipe": 2}),
        "three": (
            js.compose(js.fsdp("data", min_size=0), js.tensor(RULES), js.pipeline(chunks=1)),
            {"data": 2, "tensor": 2, "pipe": 2},
        ),
    }[name]
    mesh = js.make_mesh(devices[: int(np.prod(list(axes.values())))], **axes)
    return js.layout(strategy, mesh, MODEL.init, tx)


def values_of(layout: js.Layout, seed: int = 0) -> PyTree:
    """Random logical values of a run, on the host: random bits, signalling NaNs among them."""
    rng, (shapes, _) = np.random.default_rng(seed), run_arrays(layout)

    def draw(x: Any) -> Any:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return np.asarray(jax.random.key_data(jax.random.split(jax.random.key(7), x.shape)))
        if x.dtype == bool:
            return rng.integers(0, 2, x.shape).astype(bool)
        bits = rng.integers(0, 256, (*x.shape, np.dtype(x.dtype).itemsize), dtype=np.uint8)
        bits &= 15 if x.dtype == jnp.float4_e2m1fn else 255
        values = bits.view(x.dtype)[..., 0]
        return np.array(5, np.int32) if x.shape == () and x.dtype == jnp.int32 else values

    return jax.tree.map(draw, shapes)


def padded(x: np.ndarray, view: js.View) -> np.ndarray:
    """An array as a view stores it, by NumPy."""
    padding = [(0, wide - size) for size, wide in zip(view.logical, view.padded, strict=True)]
    return (np.pad(x, padding) if padding else x).reshape(view.stored)


def stored_values(layout: js.Layout, values: PyTree) -> PyTree:
    """The same as the layout stores them: padded with zeros and reshaped, by NumPy."""

    def store(x: Any, placement: js.Placement) -> Any:
        view = placement.view
        return x if view.logical == view.stored else padded(x, view)  # random keys are their words here

    return jax.tree.map(store, values, run_arrays(layout)[1])


def run_of(layout: js.Layout, values: PyTree) -> js.TrainState:
    """A run with these values, with the layout's shardings."""

    def put(x: Any, placement: js.Placement, shape: Any) -> jax.Array:
        sharding = placement.sharding(layout.mesh)
        if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
            made: jax.Array = jax.jit(lambda: jax.random.wrap_key_data(x), out_shardings=sharding)()
            return made
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    shapes, placements = run_arrays(layout)
    return jax.tree.map(put, stored_values(layout, values), placements, shapes)


def assert_holds(run: PyTree, values: PyTree) -> None:
    """Every shard of every array has the bits of these stored values at its place."""
    for x, expected in zip(jax.tree.leaves(run), jax.tree.leaves(values), strict=True):
        if not x.sharding.mesh.local_devices:
            continue
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert np.array_equal(jax.random.key_data(x), expected)
            continue
        for shard in x.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes()


def least_bytes(source: js.Layout, target: js.Layout, shapes: PyTree, before: PyTree, after: PyTree) -> int:
    """The bytes of elements that a target device stores and does not have in the source, counted one by one."""
    total = 0
    for x, was, will in zip(*map(jax.tree.leaves, (shapes, before, after)), strict=True):
        itemsize = 8 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.dtype(x.dtype).itemsize
        numbers = np.arange(1, 1 + int(np.prod(x.shape))).reshape(x.shape)
        held: list[dict[jax.Device, set[int]]] = []
        for layout, placement in ((source, was), (target, will)):
            view = placement.view
            stored = padded(numbers, view)
            where = placement.sharding(layout.mesh).devices_indices_map(view.stored)
            held.append({device: set(np.ravel(stored[index]).tolist()) - {0} for device, index in where.items()})
        total += itemsize * sum(len(needed - held[0].get(device, set())) for device, needed in held[1].items())
    return total
