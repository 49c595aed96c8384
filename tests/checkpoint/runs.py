"""Runs of a small pipelinable model under many layouts, and what they hold in model order."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import optax

import jaxshard as js
from jaxshard.checkpoint.leaves import Entry, entries
from jaxshard.core.tree import paths
from jaxshard.training.placing import put_stored
from tests.engines.pipeline.pipes import small_gpt
from tests.toys import start_of

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
DEPTH = 5
"""Blocks: odd, so that a pipeline pads them."""


def mesh(**axes: int) -> jax.sharding.Mesh:
    return js.make_mesh(jax.devices()[: int(np.prod(list(axes.values())))], **axes)


Where = tuple[js.Strategy, jax.sharding.Mesh, Any]


def three(devices: int) -> Where:
    tensor, pipe = min(2, max(1, devices // 2)), min(2, devices)
    strategy = js.compose(js.fsdp("data", min_size=0), js.tensor(), js.pipeline())
    return strategy, mesh(data=devices // (tensor * pipe), tensor=tensor, pipe=pipe), js.pipelined(microbatches=4)


def piped(devices: int) -> Where:
    strategy, pipe = js.compose(js.ddp("data"), js.pipeline(chunks=2)), min(2, devices)
    return strategy, mesh(data=devices // pipe, pipe=pipe), js.pipelined(microbatches=4)


def tensor(devices: int) -> Where:
    split = min(2, devices)
    return js.compose(js.zero2("data"), js.tensor()), mesh(data=devices // split, tensor=split), js.auto()


def hsdp(devices: int) -> Where:
    groups = max(1, devices // 4)
    return js.hsdp("replica", "data", min_size=0), mesh(replica=groups, data=devices // groups), js.explicit()


LAYOUTS: dict[str, Callable[[int], Where]] = {
    "ddp": lambda devices: (js.ddp("data"), mesh(data=devices), js.auto()),
    "zero1": lambda devices: (js.zero1("data", min_size=0), mesh(data=devices), js.explicit()),
    "zero2": lambda devices: (js.zero2("data", min_size=0), mesh(data=devices), js.explicit()),
    "fsdp": lambda devices: (js.fsdp("data", min_size=0), mesh(data=devices), js.explicit()),
    "hsdp": hsdp,
    "tensor": tensor,
    "pipeline": piped,
    "three": three,
}


class Made:
    """A layout over so many devices with its model: makes runs and steps, compiled once."""

    def __init__(self, name: str, devices: int, tx: optax.GradientTransformation):
        strategy, the_mesh, self.engine = LAYOUTS[name](devices)
        self.toy = small_gpt(DEPTH)
        self.layout = js.layout(strategy, the_mesh, self.toy.init_fn, tx)
        self.step = js.make_step(self.toy.loss_fn, tx, self.layout, engine=self.engine)

    def run(self) -> js.TrainState:
        """The same run for every layout, at step 3: no array is zero, nor like another."""
        numbers, (wanted, structure) = np.random.default_rng(0), entries(self.layout)

        def array(entry: Entry) -> jax.Array:
            value: Any = np.abs(numbers.normal(size=entry.shape)).astype(entry.dtype) if not entry.is_key else None
            if entry.path.startswith("params"):
                value = start[entry.path]
            if entry.shape == ():
                value = jax.random.key(7) if entry.is_key else np.int32(3)
            return put_stored(value, entry.placement, self.layout)

        params = js.TrainState(0, start_of(self.toy.init_fn), (), (), 0)
        start = dict(zip(paths(params), jax.tree.leaves(params)))
        return jax.tree.unflatten(structure, [array(entry) for entry in wanted])

    def train(self, run: js.TrainState, count: int) -> tuple[js.TrainState, list[float]]:
        """The run after so many steps, and their losses; every step has other rows."""
        losses = []
        for _ in range(count):
            run, metrics = self.step(run, jax.tree.map(partial(np.roll, shift=int(run.step), axis=-1), self.toy.batch))
            losses.append(float(metrics["loss"]))
        return run, losses


@cache
def made(name: str, devices: int = 8, tx: optax.GradientTransformation = TX) -> Made:
    return Made(name, devices, tx)


def assert_same(run: Any, expected: Any) -> None:
    """Bit for bit, where they lie included."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(run), jax.tree.leaves(expected), strict=True)
    for path, a, b in ((path, a, b) for (path, a), b in pairs):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), path
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
