"""`describe`: summarise a TrainState and its recorded metrics in a short text."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxshard.core.kinds import kind_of
from jaxshard.core.layout import Layout, human_bytes
from jaxshard.core.mesh import mesh_str
from jaxshard.core.text_table import Table, page
from jaxshard.core.types import PyTree, Role
from jaxshard.storage.paths import as_path
from jaxshard.training.goodput import Goodput
from jaxshard.training.goodput_file import LEDGER, read_goodput
from jaxshard.training.hyperparams import find_hyperparams
from jaxshard.training.records import Record
from jaxshard.training.state import TrainState, check_run


@dataclass(frozen=True)
class Description:
    """A summary of a TrainState, made by `js.describe`; prints as a short text.

    Attributes:
      mesh: the mesh: "data=8".
      step: the number of optimizer steps taken.
      parameters: the number of parameters.
      trained: the number of trained parameters.
      structure: the number of parameters below each top-level key of the tree; keys that differ only in a number are
        added up ("Block_0" and "Block_1" as "Block_*").
      bytes_per_device: the bytes on one device by role: "param", "grad", "opt", "state".
      optimizer: the type names of the parts of the optimizer's state, without "State": ("ScaleByAdam", ...).
      hyperparams: the current hyperparameters, if the optimizer's state has them; see `js.make_step`.
      seconds: wall time of the recorded steps.
      metrics: the metrics of the last recorded step; {} without records.
      evaluation: the results of the last recorded evaluation; {} if no record has an evaluation.
      goodput: the wall time by kind, from a folder of checkpoints; None without one.
    """

    mesh: str
    step: int
    parameters: int
    trained: int
    structure: dict[str, int]
    bytes_per_device: dict[Role, int]
    optimizer: tuple[str, ...]
    hyperparams: dict[str, float]
    seconds: float
    metrics: dict[str, float]
    evaluation: dict[str, float]
    goodput: Goodput | None = None

    def __str__(self) -> str:
        return "\n".join(self._table().lines)

    def _repr_html_(self) -> str:
        """Return the summary as HTML for a notebook."""
        return page(self._table())

    def _table(self) -> Table:
        on_device = ", ".join(f"{role} {human_bytes(count)}" for role, count in self.bytes_per_device.items())
        rows = [
            ("step", f"{self.step:,} on {self.mesh}"),
            ("parameters", f"{self.parameters:,}, {_share(self.trained, self.parameters)} trained"),
            *((f"  {name}", f"{count:,}") for name, count in self.structure.items()),
            ("bytes per device", on_device),
            ("optimizer", ", ".join(self.optimizer) or "without state"),
            (
                "hyperparameters",
                _numbers(self.hyperparams) or "not in the optimizer's state (optax.inject_hyperparams)",
            ),
        ]
        rows += [("time", f"{self.seconds:.4g} s of recorded steps")] if self.seconds else []
        rows += [("last step", _numbers(self.metrics))] if self.metrics else []
        rows += [("last evaluation", _numbers(self.evaluation))] if self.evaluation else []
        rows += [("wall time", str(self.goodput))] if self.goodput else []
        return Table(rows)


def describe(
    run: TrainState, layout: Layout, records: Sequence[Record] = (), *, folder: str | os.PathLike[str] | None = None
) -> Description:
    """Describe a TrainState: parameters, bytes, the optimizer and its settings, steps, time and last metrics.

    Args:
      run: the TrainState; it is not donated.
      layout: its layout.
      records: the records of `js.fit`, in order, from which time and metrics are read.
      folder: the folder of a `js.Checkpointer`, where `js.fit` counts the wall time of the training.

    Raises:
      ValueError: the TrainState does not fit the layout, or was donated to a step; the count of wall time is damaged.

    Example:
        history = []
        run = js.fit(run, step, batches, steps=100, callbacks=[history.append])
        print(js.describe(run, layout, history))
    """
    check_run(layout, run)
    sizes, trained = layout.shapes.params, jax.tree.leaves(layout.trainable)
    counts = [math.prod(x.shape) for x in jax.tree.leaves(sizes)]
    structure: dict[str, int] = defaultdict(int)
    for (path, _), count in zip(jax.tree_util.tree_leaves_with_path(sizes), counts, strict=True):
        structure[kind_of(jax.tree_util.keystr(path[:1], simple=True)) or "the array"] += count
    evaluations = [record.evaluation for record in records if record.evaluation is not None]
    return Description(
        mesh=mesh_str(layout.mesh),
        step=int(run.step),
        parameters=sum(counts),
        trained=sum(count for count, chosen in zip(counts, trained, strict=True) if chosen),
        structure=dict(structure),
        bytes_per_device=layout.bytes_per_device(),
        optimizer=tuple(_name_states(run.opt_state)),
        hyperparams={name: float(np.asarray(x)) for name, x in find_hyperparams(run.opt_state).items()},
        seconds=sum(record.seconds for record in records),
        metrics=dict(records[-1].metrics) if records else {},
        evaluation=dict(evaluations[-1]) if evaluations else {},
        goodput=None if folder is None else read_goodput(as_path(folder) / LEDGER),
    )


def _name_states(state: PyTree) -> list[str]:
    """List the type names of an optimizer's state and of the states inside it, outer states first."""
    if not isinstance(state, tuple):
        return []
    own = [type(state).__name__.removesuffix("State")] if hasattr(state, "_fields") and jax.tree.leaves(state) else []
    return own + [name for part in state for name in _name_states(part)]


def _share(part: int, whole: int) -> str:
    return "all" if part == whole else f"{part:,}"


def _numbers(numbers: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in numbers.items())
