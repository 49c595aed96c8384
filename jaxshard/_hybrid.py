"""Three-dimensional parallelism in one call: a mesh and the strategy over its axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
from jax.sharding import Mesh

from jaxshard._mesh import make_mesh
from jaxshard._rules import RULES, Rule
from jaxshard._strategy import Strategy, compose, fsdp, pipeline
from jaxshard._strategy import tensor as tensor_strategy


def hybrid(
    devices: Sequence[jax.Device] | None = None,
    /,
    *,
    data: int = -1,
    tensor: int | None = None,
    pipe: int | None = None,
    chunks: int = 2,
    split: Callable[..., Strategy] = fsdp,
    rules: Iterable[Rule] = RULES,
) -> tuple[Mesh, Strategy]:
    """(mesh, strategy) of data, tensor and pipeline parallelism over all devices; one size may be -1.

    The mesh has the axes "pipe", "data" and "tensor", in this order: neighbours on the last axis are nearest to one
    another, and tensor parallelism communicates most. Without a size, tensor and pipe are left out. `split` is what
    happens along data: `js.ddp`, `js.zero1`, `js.zero2` or `js.fsdp`; `rules` are those of `js.tensor`, `chunks` those
    of `js.pipeline`. With pipe the engine is `js.pipelined(...)`.

        mesh, strategy = js.hybrid(data=-1, tensor=2, pipe=2)
        layout = js.layout(strategy, mesh, model.init, tx)

    Raises:
      ValueError: more than one -1, or sizes that do not multiply to the number of devices.
    """
    asked = {"pipe": pipe, "data": data, "tensor": tensor}
    mesh = make_mesh(devices, **{name: size for name, size in asked.items() if size is not None})
    parts = [split("data")]
    if tensor is not None:
        parts.append(tensor_strategy(rules))
    if pipe is not None:
        parts.append(pipeline("pipe", chunks=chunks))
    return mesh, compose(*parts)
