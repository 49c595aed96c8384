"""What `--check-replicas` adds to a training: the comparison of copies, and the wait for it before a run is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxshard.checks.replicas import ReplicaWatch, check_replicas
from jaxshard.commands.saving import Saving
from jaxshard.core.layout import Layout, human_bytes
from jaxshard.training.state import TrainState


class Copies(NamedTuple):
    """The comparison of copies in one training.

    Attributes:
      layout: of the run.
      watch: the callback that compares; None without the flag.
      every: steps between comparisons.
      saved: steps between saves, of each place that runs are saved in.
    """

    layout: Layout
    watch: ReplicaWatch | None
    every: int
    saved: tuple[int, ...]

    @property
    def shown(self) -> dict[str, str]:
        """The facts that the command prints, by name."""
        if self.watch is None:
            return {}
        if not self.watch.arrays:
            return {"replicas": "no array lies on two devices, so there is nothing to compare"}
        what = f"{self.watch.arrays} arrays, {human_bytes(self.watch.bytes)} per device"
        return {"replicas": f"{what}, compared every {self.every} steps"}

    @property
    def callbacks(self) -> list[Callable[[int, TrainState], Any]]:
        """The functions that `fit` calls before it saves the run."""
        return [] if self.watch is None else [self.watch, self._wait_before_save]

    def check(self, run: TrainState) -> None:
        """Compare the copies of the last run, before it is saved; raises `ReplicasDiffer`."""
        if self.watch is not None:
            check_replicas(run, self.layout)

    def _wait_before_save(self, step: int, run: TrainState) -> None:
        assert self.watch is not None
        if any(step % every == 0 for every in self.saved):
            self.watch.wait()  # on accelerators it would be read after the save


def make_copies(every: int | None, layout: Layout, saves: Saving) -> Copies:
    """Make the comparison of `--check-replicas`.

    Raises:
      ValueError: steps would be saved whose copies were not compared.
    """
    places = {"--checkpoint-every": None if saves.folder is None else saves.every, "--memory-every": saves.memory_every}
    found = {flag: number for flag, number in places.items() if number is not None}
    if every is None:
        return Copies(layout, None, 0, ())
    for flag, number in found.items():
        if number % every:
            raise ValueError(
                f"--check-replicas {every} does not divide {flag} {number}: steps would be saved whose copies were not "
                f"compared; give {flag} {-(-number // every) * every}, or --check-replicas 1"
            )
    return Copies(layout, ReplicaWatch(layout, every=every), every, tuple(found.values()))
