"""Save a run of `jaxshard train` and resume it: `Saving` has the flags, resolved; a training begins with `Start`.

A run is resumed from memory (--memory-every) if it is there, otherwise from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

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
from jaxshard.engines.engine import Engine
from jaxshard.storage.paths import AnyPath
from jaxshard.training.state import TrainState

EVERY = 10
"""Steps between saves if --checkpoint-every is not given."""

_FIX_THE_BATCHES = {"model": "--model", "batch": "--batch", "seq": "--seq", "seed": "--seed", "corpus": "--data"}
"""Facts that decide which batch a step sees, with their flags: a run is resumed only with the same ones."""

_MAY_CHANGE = dict.fromkeys(("steps", "lr", "warmup", "decay"), "the learning rate changes")
_MAY_CHANGE |= dict.fromkeys(("clip", "optimizer"), "the steps to come are others")
"""Facts that may differ when a run is resumed, each with the effect."""


class Start(NamedTuple):
    """The state that a training starts from, and what saves it.

    Attributes:
      run: the saved run to resume, or None for a new run.
      weights: pretrained weights for a new run, or None to initialize them at random.
      memory: the `MemoryCheckpointer` that keeps copies of the run in memory, or None.
      saver: a context manager that yields the run's `Checkpointer`, or None if the run is not saved.
      notes: lines to print, such as facts that changed since the run was saved.
      shown: lines to print about checkpoints and memory, by name.
    """

    run: TrainState | None
    weights: PyTree
    memory: MemoryCheckpointer | None
    saver: AbstractContextManager[Checkpointer | None]
    notes: Sequence[str]
    shown: dict[str, str]

    @property
    def step(self) -> int:
        """The number of steps that the run has already taken; 0 for a new run."""
        return 0 if self.run is None else int(self.run.step)


class Saving(NamedTuple):
    """The folder of checkpoints, and the step to resume.

    Attributes:
      folder: the folder, or None if nothing is saved.
      every: the number of steps between saves.
      keep: the number of newest saved steps that are kept, or None for all.
      resumed: the step to resume, or None for a new run.
      ignored: {step: "damaged" or "incomplete"} for newer steps that can't be resumed; they will be overwritten.
      memory_every: the number of steps between copies into memory, or None for no copies.
    """

    folder: AnyPath | None = None
    every: int = EVERY
    keep: int | None = None
    resumed: int | None = None
    ignored: Mapping[int, str] = MappingProxyType({})
    memory_every: int | None = None

    @property
    def intervals(self) -> tuple[int, ...]:
        """The numbers of steps between saves: into the folder, and into memory, as far as each is used."""
        return tuple(filter(None, (self.every if self.folder else None, self.memory_every)))

    def begin(
        self,
        layout: Layout,
        facts: dict[str, Any],
        load: Callable[[Layout], PyTree] | None = None,
        *,
        frozen: bool = False,
    ) -> Start:
        """Restore the run to resume, from memory or from the folder, or start a new run.

        Args:
          layout: the layout of the run.
          facts: the values that determine batches and updates (`Job.sequence`); they are saved with the run, and
            compared with the saved values.
          load: a function that reads the pretrained weights of a new run onto a layout.
          frozen: True if `js.lora` freezes these weights, so that checkpoints do not contain them.

        Raises:
          ValueError: the saved run has another model or other batches, or is damaged.
          BlockingIOError: another training saves into the same folder.
        """
        notes = [] if self.folder is None or self.resumed is None else self._check_saved(self.folder, facts)
        saver: AbstractContextManager[Checkpointer | None] = nullcontext()
        if self.folder is not None:
            saver = Checkpointer(self.folder, layout, every=self.every, keep=self.keep, data=lambda: facts)
        memory = None
        if self.memory_every is not None:
            memory = MemoryCheckpointer(layout, every=self.memory_every, data=lambda: facts)
        run, more = self._recall(memory, facts)
        shown = self._shown(memory, run)
        if run is not None:
            return Start(run, None, memory, saver, [*notes, *more], shown)
        weights = load(layout) if load and (frozen or self.resumed is None) else None
        run = self._restore(layout, weights if frozen else None)
        return Start(run, weights, memory, saver, [*notes, *more], shown)

    def _check_saved(self, folder: AnyPath, facts: dict[str, Any]) -> list[str]:
        saved = describe(folder, step=self.resumed).data
        if not isinstance(saved, dict) or not saved.keys() >= _FIX_THE_BATCHES.keys():
            raise ValueError(
                f"--resume: step {self.resumed} in {folder} was not saved by jaxshard train; js.restore reads it"
            )
        return compare_facts(saved, facts, f"--resume: the run in {folder}")

    def _recall(self, memory: MemoryCheckpointer | None, facts: dict[str, Any]) -> tuple[TrainState | None, list[str]]:
        """Return (run in memory, notes to print); the run is None if memory has no run as new as the checkpoint."""
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
        return found[0], compare_facts(found[1], facts, f"--memory-every: the run in {memory.folder}")

    def _restore(self, layout: Layout, base: PyTree) -> TrainState | None:
        if self.folder is None or self.resumed is None:
            return None
        try:
            return restore(self.folder, layout, step=self.resumed, init_from=base)
        except Damaged as error:
            raise Damaged(f"{error}; --fall-back goes on from the newest step that is intact") from error

    def _shown(self, memory: MemoryCheckpointer | None, recalled: TrainState | None) -> dict[str, str]:
        shown = {}
        if self.folder is not None:
            begins = "new" if self.resumed is None else f"goes on from step {self.resumed}"
            begins += "".join(f"; step {step} is {why} and will be replaced" for step, why in self.ignored.items())
            shown["checkpoint"] = f"{self.folder}, every {self.every} steps; {begins}"
        if memory is not None:
            begins = "no run is there yet" if recalled is None else f"goes on from step {int(recalled.step)}"
            often = "after every step" if memory.every == 1 else f"every {memory.every} steps"
            shown["memory"] = f"{memory.folder}, {often}; {begins}"
        return shown


def compare_facts(saved: dict[str, Any], facts: dict[str, Any], which: str) -> list[str]:
    """Compare values such as model, batch, seed and learning rate of this run with those of the saved run.

    Args:
      saved: the values that were saved with the run.
      facts: the values of this run (`Job.sequence`).
      which: the saved run and the flag that asked for it, for error messages.

    Returns:
      A line to print for each value that differs and is allowed to, such as the learning rate.

    Raises:
      ValueError: a value differs that determines the batches, such as the seed, or the low-rank factors.
    """
    saved, facts = _split_model(saved), _split_model(facts)
    for name, flag in {"lora": "--lora", **_FIX_THE_BATCHES}.items():
        if saved[name] != facts[name]:
            why = "it has other factors" if name == "lora" else "it would see other batches"
            raise ValueError(
                f"{which} has {flag} {saved[name]}, now it is {facts[name]}: {why}. Give the same {flag}, or another "
                "folder for a new run"
            )
    return [
        f"the run so far had --{name} {saved[name]}, now it is {facts[name]}: {why}"
        for name, why in _MAY_CHANGE.items()
        if name in saved and name in facts and saved[name] != facts[name]
    ]


def _split_model(facts: dict[str, Any]) -> dict[str, Any]:
    """Divide the fact "model", such as "hf:PATH --lora rank=8", into "model" and "lora", which is "none" without."""
    model, _, factors = facts["model"].partition(" --lora ")
    return facts | {"model": model, "lora": factors or "none"}


def check_residuals(engine: Engine, layout: Layout, begin: Start) -> None:
    """Raise ValueError if a restart would lose the residuals of 8-bit gradients (--wire feedback=on)."""
    carries = bool(jax.tree.leaves(engine.residuals(layout)))
    if carries and begin.memory is not None:
        raise ValueError(
            "--wire ...,feedback=on: --memory-every keeps no residuals of gradients; leave out one of them, or save "
            "with --checkpoint"
        )
    if begin.run is not None and jax.tree.leaves(begin.run.residuals) and not carries:
        raise ValueError(
            "--resume: the run was trained with --wire gradients=int8,feedback=on and has residuals of gradients; go "
            "on with that flag"
        )


def make_saving(flags: SavingFlags, *, others: Sequence[AnyPath] = ()) -> Saving:
    """Make the `Saving` that the flags about checkpoints describe, and its folder.

    Args:
      flags: the flags.
      others: further files that the command writes, which may be in the same folder.

    Raises:
      ValueError: a flag needs another flag, the folder has saved steps and --resume is not given, or the folder has
        other files.
      OSError: the folder can't be written.
    """
    folder = flags.checkpoint
    if flags.memory_every is not None:
        try:
            memory_of_launch()
        except ValueError as error:
            raise ValueError(f"--memory-every {flags.memory_every}: {error}") from error
    if folder is None:
        own = {field.name: getattr(flags, field.name) for field in fields(SavingFlags) if field.name != "memory_every"}
        refuse("needs a folder: add --checkpoint DIR", **own)
        return Saving(memory_every=flags.memory_every)
    if not flags.resume:
        refuse("chooses the step to go on from: add --resume", fall_back=flags.fall_back)
    newest = latest_step(folder)
    _make_folder(folder, others)
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


def _make_folder(folder: AnyPath, others: Sequence[AnyPath]) -> None:
    """Make the folder of checkpoints; ValueError if it can't be written, or has other files but no saved step."""
    if isinstance(folder, Path):  # the first save into an object store takes its lease, which tells all
        check_folder("--checkpoint", folder)
    folder.mkdir(parents=True, exist_ok=True)
    own = {str(path.absolute()) for path in others}
    seen = (path for path in folder.iterdir() if not path.name.startswith("."))
    found = sorted(path.name for path in seen if str(path.absolute()) not in own)
    if found and not step_folders(absolute_root(folder)):
        raise ValueError(
            f"--checkpoint {folder} is not a folder of checkpoints: it holds {found[0]} and no step; give another one"
        )
