"""`js.MemoryCheckpointer`: keep copies of the newest steps in shared memory, which outlives the processes."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxshard.checkpoint.checksums import Damaged
from jaxshard.checkpoint.leaves import entries, list_differences
from jaxshard.checkpoint.memory.agreement import POINT, Recalled, recall
from jaxshard.checkpoint.memory.blocks import Blocks, copy_out, describe, put_back
from jaxshard.checkpoint.memory.exchange import fetch
from jaxshard.checkpoint.memory.segment import SLOTS, Bytes, Header, Record, Segment, create_segment, open_segment
from jaxshard.checkpoint.residuals import refuse_residuals
from jaxshard.checkpoint.writer import check_data
from jaxshard.core.counts import check_count
from jaxshard.core.keys import keys_of
from jaxshard.core.launch_environment import MEMORY
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.local_path import local_path
from jaxshard.core.mesh import mesh_str
from jaxshard.core.settings import own_settings
from jaxshard.core.tree import raise_all
from jaxshard.distributed.together import gather_texts
from jaxshard.training.non_finite import is_finite
from jaxshard.training.state import TrainState, check_is_run, check_run

_FILE = re.compile(r"process-(\d+)")


class MemoryCheckpointer:
    """A callback that copies a run into shared memory, from which all processes continue after one has died.

    Use it in `js.fit` under `jaxshard launch --max-restarts`, which restarts all processes when one dies:

        memory = js.MemoryCheckpointer(layout)
        found = memory.restore()
        run = js.init(init_fn, tx, layout, 0) if found is None else found[0]
        run = js.fit(run, step, js.batches(source, layout, start=run.step), steps=1000, on_run=[memory])

    After each step every process copies the shards of its devices, each once, into a file in the shared memory of its
    machine, which survives a killed process. The file has room for two steps, so that one of them is always complete; a
    checksum detects damage. `restore` returns the newest complete step, at most one step (or `every`, if larger) before
    the last step that was taken. If the memory of a machine is lost or damaged, its shards are copied from replicas in
    other processes. Under `js.hsdp` and `js.ddp` there are replicas; under `js.fsdp` there are none, so training must
    then continue from a checkpoint on disk.

    A run whose parameters have become infinite or NaN is not copied, so the last good run stays in memory. Steps that
    are repeated after a `js.Rollback` replace the earlier copies.

    Training waits while a copy is made. On accelerators that is the time to transfer a host's shards from its devices;
    choose a larger `every` if it is a large part of a step. Each process needs memory for twice the bytes of its
    shards, including the frozen parameters of `js.lora`.

    Args:
      layout: the layout. Restarted processes must have the same layout, mesh and number of processes.
      every: copy after each step whose number is divisible by this.
      dir: a folder in shared memory, different for each training run. By default the folder in the environment variable
        JAXSHARD_MEMORY, which `jaxshard launch --max-restarts` makes at its start and removes at its end. The processes
        of a machine may share it; a folder that several machines share does not work.
      data: a function `data()`, called at each copy, that returns the position of the data, as in `js.save`; at most
        64 KiB as JSON.

    Raises:
      ValueError: `every` is below 1; there is no folder, or the folder is of another model or mesh.
      OSError: there is not enough memory, or the folder can't be written.

    Attributes:
      folder: the folder in shared memory.
      every: copies are made after steps whose number is divisible by this.

    Example:
        memory = js.MemoryCheckpointer(layout)
        found = memory.restore()
        run = js.init(init_fn, tx, layout, 0) if found is None else found[0]
        run = js.fit(run, step, batches, steps=1000, on_run=[memory])
    """

    def __init__(
        self,
        layout: Layout,
        *,
        every: int = 1,
        dir: str | os.PathLike[str] | None = None,
        data: Callable[[], Any] | None = None,
    ):
        check_layout("js.MemoryCheckpointer(layout)", layout)
        check_count("MemoryCheckpointer", every=every)
        self.folder = local_path(dir) if dir is not None else memory_of_launch()
        self.every, self._layout, self._data = every, layout, data
        wanted, self._structure = entries(layout, base=True)
        self._blocks = Blocks(layout, wanted)
        self._header = Header(
            {"process": f"{jax.process_index()} of {jax.process_count()}", "mesh": mesh_str(layout.mesh)},
            {entry.path: describe(entry) for entry in wanted},
            {name: block.size for name, block in self._blocks.own.items()},
        )
        self._run: str | None = None
        self._slot, self._saves, self._saved = 0, 0, -1
        self._copied: jax.Array | None = None  # the `step` array of the run that was copied last, to recognise the run
        self._was_finite = False
        self._segment = _together(self._open_or_create, "js.MemoryCheckpointer")

    def __call__(self, step: int, run: TrainState) -> None:
        """Copy the run if `every` divides `step`, the number of the step that was just taken."""
        if step % self.every == 0:
            self.save(run)

    def save(self, run: TrainState) -> None:
        """Copy the run into memory, unless the last copy was of the same run. Every process calls this.

        Do nothing for a run with infinite or NaN parameters, if the parameters of the last copy were finite.

        Raises:
          ValueError: the run does not fit the layout; the position of the data is too long, or JSON can't represent it.
        """
        check_is_run(run)
        refuse_residuals(run, "js.MemoryCheckpointer")
        if run.step is self._copied:
            return
        finite = is_finite(run.params)
        if self._was_finite and not finite:
            return
        step = int(run.step)
        data = self._data() if self._data else None
        check_data(data)
        with own_settings(self._layout.mesh):
            if self._run is None:
                check_run(self._layout, run)
                self._begin()
            assert self._run is not None
            record = Record(self._run, step, self._saves + 1, data, [])
            write = self._write_again if step <= self._saved else self._write
            self._slot = write(record, copy_out(self._blocks, jax.tree.leaves(run)))
        self._saves, self._saved, self._copied, self._was_finite = record.saves, step, run.step, finite

    def restore(self) -> tuple[TrainState, Any] | None:
        """Restore the newest run that is complete in memory; return None if there is none. Every process calls this.

        Problems with the memory of a process are printed on standard error.

        Returns:
          (the run, the position of the data), or None if training was killed before a copy was complete in all
          processes: then start anew or from a checkpoint on disk.

        Raises:
          js.Damaged: steps were copied, but no step is complete: no process has some of its shards.
          ValueError: the memory is that of another model, mesh or number of processes, or of several training runs.
        """
        count, process = jax.process_count(), jax.process_index()
        with own_settings(self._layout.mesh):
            segments = _together(self._find_segments, POINT)
            recalled = recall(segments, lambda process: self._blocks.of_process(process).keys(), process)
            if recalled is None:
                return None
            for note in recalled.notes:
                print(f"jaxshard: {note}; goes on without them from step {recalled.step}", file=sys.stderr, flush=True)
            fetch(self._layout, self._blocks, recalled)
            self._keep(recalled)
            run = self._make_run(recalled)
            gather_texts(f"{process} of {count}", POINT)  # so that no process overwrites blocks that another may need
        self._copied, self._was_finite = run.step, is_finite(run.params)
        return run, recalled.data

    def _open_or_create(self) -> Segment:
        """Map this process's segment (file) into memory, or make a new segment if there is none or it can't be read."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self.folder / f"process-{jax.process_index()}"
        try:
            segment = open_segment(file)
        except FileNotFoundError:
            return create_segment(file, self._header)
        except Damaged as error:
            print(f"jaxshard: {error}; it is made anew", file=sys.stderr, flush=True)
            return create_segment(file, self._header)
        self._check_same(segment, self._header.facts)
        return segment

    def _find_segments(self) -> list[Segment]:
        """Memory-map the segments (files) of all processes that share the folder, this process's segment first."""
        count, found = jax.process_count(), [self._segment]
        for file in sorted(self.folder.iterdir()):
            match = _FILE.fullmatch(file.name)
            if match is None or file == self._segment.file:
                continue
            try:
                segment = open_segment(file)
            except (Damaged, FileNotFoundError):  # its own process says so, and may be about to replace it
                continue
            self._check_same(segment, self._header.facts | {"process": f"{match[1]} of {count}"})
            found.append(segment)
        return found

    def _check_same(self, segment: Segment, facts: dict[str, str]) -> None:
        """Raise ValueError if a segment (file) was written for another layout, mesh, process or number of processes."""
        there, here = segment.header, self._header
        lines = [
            f"{name}: {there.facts.get(name)} there, {fact} here"
            for name, fact in facts.items()
            if there.facts.get(name) != fact
        ]
        raise_all(
            lines + list_differences(there.arrays, here.arrays, " there"),
            ValueError,
            f"{segment.file}: this is the memory of another run; delete the folder, or give each run its own",
        )

    def _begin(self) -> None:
        """Choose a random name for this training run, the same in all processes, and clear both slots in memory."""
        self._run = gather_texts(secrets.token_hex(8), "js.MemoryCheckpointer.save")[0]
        for slot in range(SLOTS):
            self._segment.clear(slot)
        gather_texts(self._run, "js.MemoryCheckpointer.save")  # so that no process still has steps of another run

    def _write(self, record: Record, blocks: list[Bytes]) -> int:
        """Write a step into the slot that does not have the last step; return the index of the slot."""
        slot = 1 - self._slot
        self._segment.write(slot, record, blocks)
        return slot

    def _write_again(self, record: Record, blocks: list[Bytes]) -> int:
        """Write a step that is repeated after a rollback, and clear copies of abandoned steps; return the slot written.

        The rollback abandoned all steps with the same or a larger number. The repeated step is written into the slot
        with the earliest abandoned step. If the other slot has an abandoned step too, it is cleared once all processes
        have written the repeated step.

        Before any process writes, all clear their slot. Otherwise `restore` could combine shards of the abandoned and
        of the repeated step, which may have the same number.
        """
        records = [self._segment.record(slot) for slot in range(SLOTS)]
        given_up = sorted((one.step, slot) for slot, one in enumerate(records) if one and one.step >= record.step)
        slot = given_up[0][1] if given_up else 1 - self._slot
        self._segment.clear(slot)
        gather_texts(self._run or "", "js.MemoryCheckpointer.save")
        self._segment.write(slot, record, blocks)
        gather_texts(self._run or "", "js.MemoryCheckpointer.save")
        for _, later in given_up[1:]:
            self._segment.clear(later)
        return slot

    def _keep(self, recalled: Recalled) -> None:
        """Store the restored step in this process's segment, unless it is intact there, and clear later steps."""
        records = [self._segment.record(slot) for slot in range(SLOTS)]
        for slot, record in enumerate(records):
            if record is not None and record.step > recalled.step:
                self._segment.clear(slot)
        kept = next((slot for slot, record in enumerate(records) if record and record.step == recalled.step), None)
        if kept is None or self._segment.file in recalled.damaged:
            # Replace the damaged step, or a later one; the other slot keeps the step before.
            later = (slot for slot, record in enumerate(records) if record is None or record.step > recalled.step)
            kept = next(later, 0) if kept is None else kept
            record = Record(recalled.run, recalled.step, recalled.saves, recalled.data, [])
            self._segment.write(kept, record, [recalled.found[name] for name in self._header.blocks])
        self._run, self._slot, self._saves, self._saved = recalled.run, kept, recalled.saves, recalled.step

    def _make_run(self, recalled: Recalled) -> TrainState:
        arrays = put_back(self._layout, self._blocks, recalled.found)
        leaves = [keys_of(x, entry.dtype) for x, entry in zip(arrays, self._blocks.entries, strict=True)]
        run: TrainState = jax.tree.unflatten(self._structure, leaves)
        assert int(run.step) == recalled.step, "the step is one of the arrays"
        return run


def memory_of_launch() -> Path:
    """Return the folder in shared memory that `jaxshard launch` made, from the environment variable JAXSHARD_MEMORY.

    Raises:
      ValueError: the variable is not set.
    """
    folder = os.environ.get(MEMORY)
    if not folder:
        raise ValueError(
            "nothing starts these processes again, so nothing goes on from memory: start them with jaxshard launch "
            f"--max-restarts N on Linux, or set {MEMORY} to a folder in memory, such as /dev/shm/mine"
        )
    return local_path(folder)


def _together(fn: Callable[[], Any], point: str) -> Any:
    """Call a function in every process, and return its result; raise in all processes if it fails in any.

    Raises:
      OSError, ValueError: the function's own error in processes where it failed; in the others an OSError that names
        the processes that failed.
    """
    failure, result = None, None
    try:
        result = fn()
    except (OSError, ValueError) as error:
        failure = error
    failed = [
        process for process, text in enumerate(gather_texts(json.dumps(failure is not None), point)) if text == "true"
    ]
    if failure is not None:
        raise failure
    if failed:
        raise OSError(f"{point}: it failed in process {', '.join(map(str, failed))}, which says why")
    return result
