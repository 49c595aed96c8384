"""Small models for pipelines, and a pipelined run of them beside the same on one device.

96 rows are cut into 2, 3, 4, 6, 8, 12, 16 or 32 micro-batches. Width 7 divides by nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js
from jaxshard.models.gpt import gpt
from tests.toys import Toy, Trace, mask, one_device, sharded

PyTree = Any
ROWS, FEATURES, WIDTH = 96, 5, 7


def drop(x: jax.Array, key: jax.Array | None, rate: float) -> jax.Array:
    """Dropout that is the same for a row wherever it is computed."""
    if key is None or rate == 0:
        return x
    keep = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[1:]))(js.row_keys(key, len(x)))
    return jnp.where(keep, x / (1 - rate), 0)


def rows_batch(rows: int = ROWS) -> PyTree:
    """Regression of 5 numbers from 5, half of the rows without weight, and a scalar."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(rows, FEATURES)).astype(np.float32) for _ in range(2))
    return {"x": x, "y": y, "weights": mask((rows,)), "scale": np.float32(0.9)}


def squared_error(out: jax.Array, batch: PyTree) -> js.Mean:
    error = jnp.square(out - batch["y"]).sum(-1)
    return js.Mean((error * batch["weights"]).sum(), batch["weights"].sum())


Block = Callable[[PyTree, Any, Any], Any]


def residual_block(params: PyTree, x: jax.Array, key: Any) -> jax.Array:
    """The usual one."""
    return x + jnp.tanh(x @ params["w"] + params["b"])


@cache
def stack_toy(block: Block = residual_block, depth: int = 8, *, tied: bool = False, rows: int = ROWS) -> Toy:
    """Linear 5 -> 7, so many blocks of a matrix w and a bias b, linear 7 -> 5: the transposed first one if tied."""
    scale = min(0.25, 2 / depth)  # 33 blocks of 0.25 amplify roundings a hundredfold

    def init(key: jax.Array) -> PyTree:
        keys = jax.random.split(key, 3)
        return {
            "embed": {"w": jax.random.normal(keys[0], (FEATURES, WIDTH)) / 2},
            "block": {"w": jax.random.normal(keys[1], (WIDTH, WIDTH)) * scale, "b": jnp.full(WIDTH, 0.01)},
            "head": {"scale": jnp.ones(WIDTH)} | ({} if tied else {"w": jax.random.normal(keys[2], (WIDTH, FEATURES))}),
        }

    def embed(params: PyTree, batch: PyTree, key: Any) -> jax.Array:
        return batch["x"] @ params["embed"]["w"] * batch["scale"]

    def head(params: PyTree, x: jax.Array, batch: PyTree, key: Any) -> js.Mean:
        out = params["embed"]["w"].T if tied else params["head"]["w"]
        return squared_error(x * params["head"]["scale"] @ out / 4, batch)

    model = js.Stacked(embed, block, head, num_blocks=depth, init=init)
    return Toy(model.init, model.loss, rows_batch(rows), rate=0.02)


def dropping_block(params: PyTree, x: jax.Array, key: Any) -> jax.Array:
    return x + drop(jnp.tanh(x @ params["w"] + params["b"]), key, 0.2)


@cache
def small_gpt(depth: int, *, dropout: float = 0.0, tied: bool = True, rows: int = 16, width: int = 16) -> Toy:
    """Rows of 8 tokens."""
    model = gpt(vocab=24, width=width, depth=depth, heads=2, seq=8, dropout=dropout, tied=tied)
    tokens = np.random.default_rng(0).integers(0, 24, (rows, 9), dtype=np.int32)
    return Toy(model.init, model.loss, {"tokens": tokens, "weights": mask((rows, 8))})


def cast_weights(toy: Toy) -> Toy:
    """What `compute_dtype` does, by hand: the control on one device."""

    def loss_fn(params: PyTree, batch: PyTree, key: Any) -> Any:
        return toy.loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch, key)

    return toy._replace(loss_fn=loss_fn)


def ring(devices: int) -> jax.sharding.Mesh:
    """A pipeline and nothing else."""
    return js.make_mesh(jax.devices()[:devices], pipe=devices)


class Ring(NamedTuple):
    """A pipeline alone: its devices, its chunks."""

    devices: int
    chunks: int

    def run(self, toy: Toy, engine: Any, tx: Any = None, *, steps: int = 2, **options: Any) -> tuple[Trace, js.Layout]:
        strategy = js.pipeline(chunks=self.chunks)
        return sharded(toy, strategy, ring(self.devices), engine, tx, steps=steps, **options)

    def layout(self, toy: Toy, tx: Any = None, **options: Any) -> js.Layout:
        tx = optax.sgd(toy.rate) if tx is None else tx
        return js.layout(js.pipeline(chunks=self.chunks), ring(self.devices), toy.init_fn, tx, **options)


@cache
def reference(make: Callable[..., Toy], *args: Any, steps: int = 2, **options: Any) -> Trace:
    """Two steps of a toy on one device."""
    return one_device(make(*args, **options), steps=steps)
