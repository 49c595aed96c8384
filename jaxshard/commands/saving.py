"""Where `jaxshard train` saves a run and from which step it goes on, resolved from the flags: `Saving`.

A run goes on from memory (--memory-every) where there is one, and else from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxshard.checkpoint.checkpointer import Checkpointer
from jaxshard.checkpoint.checksums import Damaged
from jaxshard.checkpoint.folder import absolute_root, complete_steps, latest_step, step_folders
from jaxshard.checkpoint.memory.checkpointer import MemoryCheckpointer, memory_of_launch
from jaxshard.checkpoint.reader import describe, restore
from jaxshard.commands.errors import refuse
from jaxshard.commands.flags import Saving as SavingFlags
from jaxshard.commands.outputs import check_folder
from jaxshard.core.layout import Layout
from jaxshard.core.types import PyTree
from jaxshard.hf.config import make_config
from jaxshard.hf.folder import CONFIG
from jaxshard.models.decoder import Decoder
from jaxshard.training.state import TrainState

EVERY = 10
"""Steps between saves where --checkpoint-every is not given."""

_FIX_THE_BATCHES = {"model": "--model", "batch": "--batch", "seq": "--seq", "seed": "--seed", "corpus": "--data"}
"""Facts of a saved run that decide which batch a step sees, with their flags: a run goes on only with the same ones."""

_CHANGE_THE_REST = dict.fromkeys(("steps", "lr", "warmup", "decay"), "the learning rate changes")
_CHANGE_THE_REST |= dict.fromkeys(("clip", "optimizer"), "the steps to come are others")
"""Facts of a saved run that a run may go on with other values of, each with the effect."""


class Saving(NamedTuple):
    """The folder that a run is saved in, and the step to go on from.

    Attributes:
      folder: the folder of checkpoints, or None where nothing is saved.
      every: steps between saves.
      keep: how many of the newest steps stay, or None for all.
      resumed: the step to go on from, or None for a new run.
      ignored: newer steps that the run does not go on from, with the reason; they will be replaced.
      memory_every: steps between copies into memory, or None for none.
    """

    folder: Path | None = None
    every: int = EVERY
    keep: int | None = None
    resumed: int | None = None
    ignored: Mapping[int, str] = MappingProxyType({})
    memory_every: int | None = None

    @property
    def shown(self) -> dict[str, str]:
        """The facts that the command prints, by name."""
        if self.folder is None:
            return {}
        begins = "new" if self.resumed is None else f"goes on from step {self.resumed}"
        begins += "".join(f"; step {step} is {why} and will be replaced" for step, why in self.ignored.items())
        return {"checkpoint": f"{self.folder}, every {self.every} steps; {begins}"}

    def restore_run(self, layout: Layout, base: PyTree = None) -> TrainState | None:
        """Restore the run to go on with; None for a new run.

        Args:
          layout: of the run.
          base: the weights it began with, for a layout with low-rank factors, whose checkpoints lack what is frozen.

        Raises:
          ValueError: as `js.restore`: the checkpoint is of another model, or damaged.
        """
        if self.folder is None or self.resumed is None:
            return None
        try:
            return restore(self.folder, layout, step=self.resumed, init_from=base)
        except Damaged as error:
            raise Damaged(f"{error}; --fall-back goes on from the newest step that is intact") from error

    def checkpointer(self, layout: Layout, facts: dict[str, Any]) -> AbstractContextManager[Checkpointer | None]:
        """Make the context of the run's `Checkpointer`, which waits for its last save; of None without a folder.

        `facts` are saved beside the run, for `check_facts` when it goes on.
        """
        if self.folder is None:
            return nullcontext()
        return Checkpointer(self.folder, layout, every=self.every, keep=self.keep, data=lambda: facts)

    def memory(self, layout: Layout, facts: dict[str, Any]) -> MemoryCheckpointer | None:
        """Make what keeps the run in memory; `facts` are kept beside it, for `recall`."""
        if self.memory_every is None:
            return None
        return MemoryCheckpointer(layout, every=self.memory_every, data=lambda: facts)

    def recall(self, memory: MemoryCheckpointer | None, facts: dict[str, Any]) -> tuple[TrainState | None, list[str]]:
        """Return (the run that is in memory, or None where there is none as new as the checkpoint, notes about it).

        Raises:
          ValueError: it is of another training than `facts` says; or shards of it are lost, and there is no checkpoint
            to go on from.
        """
        if memory is None:
            return None, []
        try:
            found = memory.restore()
        except Damaged as error:
            if self.resumed is None:
                raise Damaged(f"--memory-every: {error}; there is none that --checkpoint and --resume name") from error
            return None, [f"--memory-every: {error}"]
        if found is None or int(found[0].step) < (self.resumed or 0):  # copies may be rarer than saves
            return None, []
        return found[0], _compare_facts(found[1], facts, f"--memory-every: the run in {memory.folder}")

    def check_facts(self, facts: dict[str, Any]) -> list[str]:
        """Compare the facts of this run with those of the saved one, and note what changes.

        Args:
          facts: `Job.sequence`, all that decides batches and learning rates.

        Returns:
          A line for each fact that may differ and does: those that change the learning rate of the steps to come.

        Raises:
          ValueError: the batches would be others than those of the run that was saved.
        """
        if self.folder is None or self.resumed is None:
            return []
        saved = describe(self.folder, step=self.resumed).data
        if not isinstance(saved, dict) or not saved.keys() >= _FIX_THE_BATCHES.keys():
            raise ValueError(
                f"--resume: step {self.resumed} in {self.folder} was not saved by jaxshard train; js.restore reads it"
            )
        return _compare_facts(saved, facts, f"--resume: the run in {self.folder}")


def _compare_facts(saved: dict[str, Any], facts: dict[str, Any], which: str) -> list[str]:
    """Compare facts as `Saving.check_facts`; `which` names the saved run and the flag that asked for it."""
    for name, flag in _FIX_THE_BATCHES.items():
        if saved[name] != facts[name]:
            raise ValueError(
                f"{which} has {flag} {saved[name]}, now it is {facts[name]}: it would see other batches. Give the same "
                f"{flag}, or another folder for a new run"
            )
    return [
        f"the run so far had --{name} {saved[name]}, now it is {facts[name]}: {why}"
        for name, why in _CHANGE_THE_REST.items()
        if name in saved and name in facts and saved[name] != facts[name]
    ]


def describe_memory(memory: MemoryCheckpointer | None, step: int | None) -> dict[str, str]:
    """Return the fact about memory that the command prints; `step` is the one that it goes on from."""
    if memory is None:
        return {}
    begins = "no run is there yet" if step is None else f"goes on from step {step}"
    often = "after every step" if memory.every == 1 else f"every {memory.every} steps"
    return {"memory": f"{memory.folder}, {often}; {begins}"}


def make_saving(flags: SavingFlags, *, others: Sequence[Path | None] = ()) -> Saving:
    """Resolve the flags about checkpoints, and check that the folder can be written.

    Args:
      flags: what was asked for.
      others: files that the command writes besides, perhaps into the same folder.

    Raises:
      ValueError: flags that need others, a folder with steps where --resume is not given, or a folder of something
        else.
      OSError: a folder that can't be written.
    """
    folder = flags.checkpoint
    if flags.memory_every is not None:
        _check_memory(flags.memory_every)
    if folder is None:
        own = {field.name: getattr(flags, field.name) for field in fields(SavingFlags) if field.name != "memory_every"}
        refuse("needs a folder: add --checkpoint DIR", **own)
        return Saving(memory_every=flags.memory_every)
    if not flags.resume:
        refuse("chooses the step to go on from: add --resume", fall_back=flags.fall_back)
    newest = latest_step(folder)
    _check_folder(folder, others)
    if newest is not None and not flags.resume:
        raise ValueError(
            f"--checkpoint {folder}: a run is there, saved at step {newest}; add --resume to go on with it, or "
            "give another folder"
        )
    begin = latest_step(folder, intact=True) if flags.fall_back else newest
    if begin is None and newest is not None:
        raise ValueError(
            f"--fall-back: no step in {folder} is intact, the newest is {newest}; jaxshard checkpoint verify {folder} "
            "says what is damaged"
        )
    root, after = absolute_root(folder), -1 if begin is None else begin
    saved = complete_steps(root)
    ignored = {step: "damaged" if step in saved else "incomplete" for step in step_folders(root) if step > after}
    return Saving(folder, flags.checkpoint_every or EVERY, flags.keep, begin, ignored, flags.memory_every)


def _check_memory(every: int) -> None:
    """Raise unless there is a folder in memory."""
    try:
        memory_of_launch()
    except ValueError as error:
        raise ValueError(f"--memory-every {every}: {error}") from error


def check_export(folder: Path | None, network: Any) -> None:
    """Raise for a folder that the trained model can't be written into, or a model that transformers does not know."""
    if folder is None:
        return
    check_folder("--export", folder)
    if not isinstance(network, Decoder):
        raise ValueError(f"--export {folder}: transformers has no such model; export models of language")
    if (folder / CONFIG).exists():
        raise ValueError(f"--export {folder}: there is a model already; give another folder")
    try:
        make_config(network, "float32")
    except ValueError as error:
        raise ValueError(f"--export {folder}: {error}") from error


def _check_folder(folder: Path, others: Sequence[Path | None]) -> None:
    """Raise for a folder of something else than steps, or that can't be written; make it if it is absent."""
    check_folder("--checkpoint", folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = {path.absolute() for path in others if path is not None}
    seen = (path for path in folder.iterdir() if not path.name.startswith("."))
    found = sorted(path.name for path in seen if path.absolute() not in own)
    if found and not step_folders(absolute_root(folder)):
        raise ValueError(
            f"--checkpoint {folder} is not a folder of checkpoints: it holds {found[0]} and no step; give another one"
        )
