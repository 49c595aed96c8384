"""`Judge`: asks the stopping rule of `js.fit`, and keeps the evaluations on disk, so that a restart knows them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxshard.distributed.together import gather_texts
from jaxshard.training.early_stopping import EarlyStopping
from jaxshard.training.records import Record

EVALUATIONS = ".early_stopping.json"
"""The name of the file in a folder of checkpoints: a list of pairs (step, metrics that the rule was asked about)."""

Evaluations = list[tuple[int, dict[str, float]]]


class Judge:
    """A stopping rule, and what it was asked so far.

    A `js.EarlyStopping` that has seen no evaluation is first asked about those in the file, up to the step of the run:
    after a restart it goes on with the same best value and patience. Later evaluations in the file are dropped, since
    their steps are taken again. Other rules are functions whose memory is their own.

    Args:
      stop: the rule; None never ends training.
      folder: the folder of checkpoints; None keeps nothing. Only the first process has one.
      start: the number of steps that the run has taken.
      evaluates: True to ask only about evaluations, False to ask about every step that was not bad.

    Attributes:
      ended: True if the rule had ended the training before the restart.
    """

    def __init__(
        self,
        stop: Callable[[Mapping[str, float]], bool] | None,
        folder: Path | None,
        start: int,
        *,
        evaluates: bool,
    ):
        self._stop, self._evaluates, self.ended = stop, evaluates, False
        self._file, self._asked = None, Evaluations()
        if isinstance(stop, EarlyStopping) and stop.judges_evaluations:
            self._file = None if folder is None else folder / EVALUATIONS
            found: Evaluations = json.loads(gather_texts(json.dumps(_read(self._file)), "js.fit")[0])
            self._asked = [(step, metrics) for step, metrics in found if step <= start]
            for _, metrics in () if stop.last else self._asked:
                self.ended = stop(metrics)
            if self.ended:
                warnings.warn(
                    f"fit: no step is taken, because early stopping had ended this training: {stop.reason}; to train "
                    f"on, delete the file {EVALUATIONS} in the folder of checkpoints",
                    stacklevel=3,
                )

    def __call__(self, records: Sequence[Record]) -> bool:
        """Ask the rule about new records; return True if training should end."""
        if self._stop is None:
            return False
        for record in records:
            if (metrics := self._judged(record)) is None:
                continue
            if self._file is not None:
                self._asked = [one for one in self._asked if one[0] < record.step] + [(record.step, metrics)]
                _write(self._file, self._asked)
            if self._stop(metrics):
                return True
        return False

    def _judged(self, record: Record) -> dict[str, float] | None:
        """Return the metrics to ask about: the evaluation with the "update_norm" of its step, or those of the step."""
        if not self._evaluates:
            return None if record.metrics.get("bad") else record.metrics
        norm = {name: x for name, x in record.metrics.items() if name == "update_norm"}
        return None if record.evaluation is None else norm | record.evaluation


def _read(file: Path | None) -> Evaluations:
    """Read evaluations; for a file that can't be read, warn and return none."""
    if file is None or not file.exists():
        return []
    try:
        return [
            (int(step), {str(k): float(x) for k, x in metrics.items()})
            for step, metrics in json.loads(file.read_bytes())
        ]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"fit: early stopping begins anew, because {file} can't be read: {error}", stacklevel=4)
        return []


def _write(file: Path, evaluations: Evaluations) -> None:
    """Replace the file at once; if it can't be written, warn: only a restart would need it."""
    new = file.with_name(f"{file.name}.new")
    try:
        new.write_text(json.dumps([(step, {k: float(x) for k, x in one.items()}) for step, one in evaluations]))
        os.replace(new, file)
    except OSError as error:
        warnings.warn(f"fit: after a restart early stopping would begin anew: {file}: {error.strerror}", stacklevel=4)
