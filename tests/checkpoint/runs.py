"""Runs of a small pipelinable model under many layouts, and what they hold in model order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
import optax

import jaxshard as js
from jaxshard._state import _put
from jaxshard._tree import paths
from jaxshard.checkpoint.leaves import Entry, entries
from tests.engines.pipes import small_gpt
from tests.toys import start_of

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
DEPTH = 5
"""Blocks: odd, so that a pipeline pads them."""


def mesh(**axes: int) -> jax.sharding.Mesh:
    return js.make_mesh(jax.devices()[: int(np.prod(list(axes.values())))], **axes)


def three() -> tuple[js.Strategy, jax.sharding.Mesh, Any]:
    strategy = js.compose(js.fsdp("data", min_size=0), js.tensor(), js.pipeline())
    return strategy, mesh(data=2, tensor=2, pipe=2), js.pipelined(microbatches=4)


LAYOUTS: dict[str, Callable[[], tuple[js.Strategy, jax.sharding.Mesh, Any]]] = {
    "one": lambda: (js.ddp("data"), mesh(data=1), js.auto()),
    "ddp": lambda: (js.ddp("data"), mesh(data=8), js.auto()),
    "zero1": lambda: (js.zero1("data", min_size=0), mesh(data=4), js.auto()),
    "fsdp": lambda: (js.fsdp("data", min_size=0), mesh(data=8), js.explicit()),
    "hsdp": lambda: (js.hsdp("replica", "data", min_size=0), mesh(replica=2, data=4), js.explicit()),
    "tensor": lambda: (js.compose(js.zero2("data"), js.tensor()), mesh(data=2, tensor=2), js.auto()),
    "pipeline": lambda: (js.pipeline(chunks=2), mesh(pipe=2), js.pipelined(microbatches=4)),
    "three": three,
}


class Made:
    """A layout with its model: makes runs and steps."""

    def __init__(self, name: str):
        strategy, the_mesh, self.engine = LAYOUTS[name]()
        self.toy = small_gpt(DEPTH)
        self.layout = js.layout(strategy, the_mesh, self.toy.init_fn, TX)

    def run(self) -> js.TrainState:
        """The same run for every layout, at step 3: no array is zero, nor like another."""
        numbers, (wanted, structure) = np.random.default_rng(0), entries(self.layout)

        def array(entry: Entry) -> jax.Array:
            value: Any = np.abs(numbers.normal(size=entry.shape)).astype(entry.dtype) if not entry.is_key else None
            if entry.path.startswith("params"):
                value = start[entry.path]
            if entry.shape == ():
                value = jax.random.key(7) if entry.is_key else np.int32(3)
            return _put(value, entry.placement, self.layout)

        params = js.TrainState(0, start_of(self.toy.init_fn), (), (), 0)
        start = dict(zip(paths(params), jax.tree.leaves(params)))
        return jax.tree.unflatten(structure, [array(entry) for entry in wanted])

    def steps(self, run: js.TrainState, count: int = 2) -> list[float]:
        step, losses = js.make_step(self.toy.loss_fn, TX, self.layout, engine=self.engine), []
        for _ in range(count):
            run, metrics = step(run, self.toy.batch)
            losses.append(float(metrics["loss"]))
        return losses


@cache
def made(name: str) -> Made:
    return Made(name)


def assert_same(run: Any, expected: Any) -> None:
    """Bit for bit, where they lie included."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(run), jax.tree.leaves(expected), strict=True)
    for path, a, b in ((path, a, b) for (path, a), b in pairs):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), path
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
