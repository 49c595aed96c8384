"""Where `jaxshard train` saves a run, and from which step it goes on: the flags about checkpoints."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.checkpoint.checkpointer import Checkpointer
from jaxshard.checkpoint.checksums import Damaged
from jaxshard.checkpoint.folder import complete, latest_step, numbered, root_of
from jaxshard.checkpoint.reader import describe, restore
from jaxshard.core.layout import Layout
from jaxshard.training.state import TrainState

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
    """A folder of checkpoints, or None; how often, and how many steps are kept; the step to go on from, or None.

    `passed` are newer steps that are not gone on from, with the reason.
    """

    folder: Path | None
    every: int
    keep: int | None
    resumed: int | None
    passed: dict[int, str]

    @property
    def shown(self) -> dict[str, str]:
        """What is saved and where the run begins, for the eye."""
        if self.folder is None:
            return {}
        begins = "new" if self.resumed is None else f"goes on from step {self.resumed}"
        begins += "".join(f"; step {step} is {why} and will be replaced" for step, why in self.passed.items())
        return {"checkpoint": f"{self.folder}, every {self.every} steps; {begins}"}

    def restored(self, layout: Layout) -> TrainState | None:
        """The run to go on with; None where there is none, and it starts at step 0.

        Raises:
          ValueError: as `js.restore`: another model, damaged files.
        """
        if self.folder is None or self.resumed is None:
            return None
        try:
            return restore(self.folder, layout, step=self.resumed)
        except Damaged as error:
            raise Damaged(f"{error}; --fall-back goes on from the newest step that is intact") from error

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
    *,
    checkpoint: Path | None,
    resume: bool,
    fall_back: bool,
    checkpoint_every: int | None,
    keep: int | None,
    others: Sequence[Path | None] = (),
) -> Saving:
    """What the flags say; `others` are what else the command writes, perhaps into the same folder.

    Raises:
      ValueError: flags that need others; a folder with steps where --resume was not given; a folder of something else.
      OSError: a folder that can't be written.
    """
    given = {"resume": resume, "fall-back": fall_back, "checkpoint-every": checkpoint_every, "keep": keep}
    if checkpoint is None:
        _refuse(given, "needs a folder: add --checkpoint DIR")
        return Saving(None, EVERY, None, None, {})
    if not resume:
        _refuse({"fall-back": fall_back}, "chooses the step to go on from: add --resume")
    for name, count in (("checkpoint-every", checkpoint_every), ("keep", keep)):
        if count is not None and count < 1:
            raise ValueError(f"--{name} {count}: give a number above 0")
    newest = latest_step(checkpoint)
    _check_folder(checkpoint, others)
    if newest is not None and not resume:
        raise ValueError(
            f"--checkpoint {checkpoint}: a run is there, saved at step {newest}; add --resume to go on with it, or "
            "give another folder"
        )
    begin = _newest_intact(checkpoint, newest) if fall_back and newest is not None else newest
    passed = {step: "damaged" for step in complete(root_of(checkpoint)) if begin is not None and step > begin}
    passed |= {
        step: "incomplete"
        for step in numbered(root_of(checkpoint))
        if step > (-1 if begin is None else begin) and step not in passed
    }
    return Saving(checkpoint, checkpoint_every or EVERY, keep, begin, passed)


def _check_folder(folder: Path, others: Sequence[Path | None]) -> None:
    """Raises where a folder holds something else than steps, or can't be written; makes it if it is absent."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {path.absolute() for path in others if path is not None}
    seen = (path for path in folder.iterdir() if not path.name.startswith("."))
    found = sorted(path.name for path in seen if path.absolute() not in own)
    if found and not numbered(root_of(folder)):
        raise ValueError(
            f"--checkpoint {folder} is not a folder of checkpoints: it holds {found[0]} and no step; give another one"
        )
    with tempfile.TemporaryFile(dir=folder, prefix="."):
        pass  # now, and not when there is something to lose


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
