"""`Judge`: asks the stopping rule of `js.fit`, and keeps the evaluations on disk, so that a restart knows them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence

from jaxshard.distributed.together import gather_texts
from jaxshard.storage.paths import AnyPath, replace_file
from jaxshard.training.early_stopping import EarlyStopping
from jaxshard.training.records import Record

EVALUATIONS = ".early_stopping.json"
"""The name of the file in a folder of checkpoints: a list of pairs (step, its evaluation and "update_norm")."""

Evaluations = list[tuple[int, dict[str, float]]]


class Judge:
    """A stopping rule, and the evaluations so far.

    A `js.EarlyStopping` that has seen no evaluation is first asked about those in the file, up to the step of the run:
    after a restart it goes on with the same best value and patience. Later evaluations in the file are dropped, since
    their steps are taken again. Other rules are functions whose memory is their own.

    Args:
      stop: the rule; None never ends training.
      folder: the folder of checkpoints; None keeps nothing. Only the first process has one.
      start: the number of steps that the run has taken.
      evaluates: True to ask only about evaluations, False to ask about every step that was not bad.
      keeps_best: True if a callback keeps the run with the best evaluation, which a restart must know, too.

    Attributes:
      keeps: True if evaluations are kept in the folder.
      known: the kept evaluation of step `start`, or None.
      ended: True if the rule ended the training at step `start`.
    """

    def __init__(
        self,
        stop: Callable[[Mapping[str, float]], bool] | None,
        folder: AnyPath | None,
        start: int,
        *,
        evaluates: bool,
        keeps_best: bool,
    ):
        self._stop, self._evaluates, self._start = stop, evaluates, start
        self.keeps, self.known, self.ended = False, None, False
        self._file, self._asked = None, Evaluations()
        if keeps_best or (isinstance(stop, EarlyStopping) and stop.judges_evaluations):
            self._file = None if folder is None else folder / EVALUATIONS
            found: Evaluations | None = json.loads(gather_texts(json.dumps(_read(self._file)), "js.fit")[0])
            self.keeps = found is not None
            self._asked = [(step, metrics) for step, metrics in found or () if step <= start]
        if self._asked and self._asked[-1][0] == start:
            self.known = {name: x for name, x in self._asked[-1][1].items() if name != "update_norm"}
        if isinstance(stop, EarlyStopping):
            for _, metrics in () if stop.last else self._asked:
                self.ended = stop(metrics)
            if self.ended:
                warnings.warn(
                    f"fit: no step is taken, because early stopping had ended this training: {stop.reason}; to train "
                    f"on, delete the file {EVALUATIONS} in the folder of checkpoints",
                    stacklevel=3,
                )

    def catch_up(self, evaluation: Mapping[str, float]) -> None:
        """Ask the rule about an evaluation of step `start` that was not kept."""
        unknown = {"update_norm": math.nan}  # the step was taken by an earlier process
        self.ended = self([Record(self._start, unknown, 0.0, {}, dict(evaluation))])

    def __call__(self, records: Sequence[Record]) -> bool:
        """Keep the evaluations of new records, and ask the rule about them; return True if training should end."""
        if self._stop is None and not self.keeps:
            return False
        for record in records:
            if (metrics := self._judged(record)) is None:
                continue
            if self._file is not None:
                self._asked = [one for one in self._asked if one[0] < record.step] + [(record.step, metrics)]
                _write(self._file, self._asked)
            if self._stop is not None and self._stop(metrics):
                return True
        return False

    def _judged(self, record: Record) -> dict[str, float] | None:
        """Return the metrics to ask about: the evaluation with the "update_norm" of its step, or those of the step."""
        if not self._evaluates:
            return None if record.metrics.get("bad") else record.metrics
        norm = {name: x for name, x in record.metrics.items() if name == "update_norm"}
        return None if record.evaluation is None else norm | record.evaluation


def _read(file: AnyPath | None) -> Evaluations | None:
    """Read evaluations, or return None if `file` is None; for a file that can't be read, warn and return none."""
    if file is None or not file.exists():
        return None if file is None else []
    try:
        return [
            (int(step), {str(k): float(x) for k, x in metrics.items()})
            for step, metrics in json.loads(file.read_bytes())
        ]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"fit: early stopping begins anew, because {file} can't be read: {error}", stacklevel=4)
        return []


def _write(file: AnyPath, evaluations: Evaluations) -> None:
    """Replace the file at once; if it can't be written, warn: only a restart would need it."""
    text = json.dumps([(step, {k: float(x) for k, x in one.items()}) for step, one in evaluations])
    try:
        replace_file(file, text.encode())
    except OSError as error:
        why = error.strerror or error
        warnings.warn(f"fit: after a restart early stopping would begin anew: {file}: {why}", stacklevel=4)
