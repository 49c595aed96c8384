"""Where `jaxshard train` saves a run, and from which step it goes on: the flags about checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard._layout import Layout
from jaxshard._state import TrainState
from jaxshard.checkpoint import Checkpointer, describe, latest_step, restore

EVERY = 10
"""Steps between saves where nothing is said."""

_SAME = {
    "model": "--model",
    "batch": "--batch",
    "seq": "--seq",
    "seed": "--seed",
    "corpus": "--data",
}
"""What decides which batch a step sees, and the flags that say it: a run can't go on with another."""

_CHANGES_RATE = {"steps": "--steps", "lr": "--lr"}
"""What only decides the learning rate of the steps to come."""


class Saving(NamedTuple):
    """A folder of checkpoints, or None; how often, and how many steps are kept; the step to go on from, or None."""

    folder: Path | None
    every: int
    keep: int | None
    resumed: int | None

    @property
    def shown(self) -> dict[str, str]:
        """What is saved and where the run begins, for the eye."""
        if self.folder is None:
            return {}
        begins = "new" if self.resumed is None else f"goes on from step {self.resumed}"
        return {"checkpoint": f"{self.folder}, every {self.every} steps; {begins}"}

    def restored(self, layout: Layout) -> TrainState | None:
        """The run to go on with; None where there is none, and it starts at step 0.

        Raises:
          ValueError: as `js.restore`: another model, damaged files.
        """
        if self.folder is None or self.resumed is None:
            return None
        return restore(self.folder, layout, step=self.resumed)

    @contextlib.contextmanager
    def checkpointers(self, layout: Layout, about: dict[str, Any]) -> Iterator[list[Checkpointer]]:
        """What saves the run, with what `checked` compares; nothing without a folder. Waits for the last save."""
        if self.folder is None:
            yield []
            return
        with Checkpointer(self.folder, layout, every=self.every, keep=self.keep, data=lambda: about) as checkpointer:
            yield [checkpointer]

    def checked(self, about: dict[str, Any]) -> list[str]:
        """What differs from the run that was saved and may: only the learning rate of the steps to come.

        Raises:
          ValueError: the batches would be others than those of the run that was saved.
        """
        if self.folder is None or self.resumed is None:
            return []
        saved = describe(self.folder, step=self.resumed).data
        if not isinstance(saved, dict) or not saved.keys() >= about.keys():
            raise ValueError(
                f"--resume: step {self.resumed} in {self.folder} was not saved by jaxshard train; js.restore reads it"
            )
        for name, flag in _SAME.items():
            if saved[name] != about[name]:
                raise ValueError(
                    f"--resume: the run in {self.folder} has {flag} {saved[name]}, now it is {about[name]}: it would "
                    f"see other batches. Give the same {flag}, or another folder for a new run"
                )
        return [
            f"the run so far had {flag} {saved[name]}, now it is {about[name]}: the learning rate changes"
            for name, flag in _CHANGES_RATE.items()
            if saved[name] != about[name]
        ]


def saving(
    *, checkpoint: Path | None, resume: bool, fall_back: bool, checkpoint_every: int | None, keep: int | None
) -> Saving:
    """What the flags say.

    Raises:
      ValueError: flags that need others; a folder with steps where --resume was not given.
    """
    given = {"resume": resume, "fall-back": fall_back, "checkpoint-every": checkpoint_every, "keep": keep}
    if checkpoint is None:
        _refuse(given, "needs a folder: add --checkpoint DIR")
        return Saving(None, EVERY, None, None)
    if not resume:
        _refuse({"fall-back": fall_back}, "chooses the step to go on from: add --resume")
    for name, count in (("checkpoint-every", checkpoint_every), ("keep", keep)):
        if count is not None and count < 1:
            raise ValueError(f"--{name} {count}: give a number above 0")
    if checkpoint.exists() and not checkpoint.is_dir():
        raise ValueError(f"--checkpoint {checkpoint}: that is a file; give a folder")
    newest = latest_step(checkpoint)
    if newest is not None and not resume:
        raise ValueError(
            f"--checkpoint {checkpoint}: a run is there, saved at step {newest}; add --resume to go on with it, or "
            "give another folder"
        )
    if fall_back and newest is not None:
        newest = _newest_intact(checkpoint, newest)
    return Saving(checkpoint, checkpoint_every or EVERY, keep, newest)


def _newest_intact(folder: Path, newest: int) -> int:
    intact = latest_step(folder, intact=True)
    if intact is None:
        raise ValueError(
            f"--fall-back: no step in {folder} is intact, the newest is {newest}; jaxshard checkpoint verify {folder} "
            "says what is damaged"
        )
    return intact


def _refuse(flags: dict[str, Any], why: str) -> None:
    for name, value in flags.items():
        if value is not None and value is not False:
            shown = "" if value is True else f" {value}"
            raise ValueError(f"--{name}{shown} {why}")
