"""What it costs when a process of four is killed, and all go on from the memory that outlives them.

    python benchmarks/restarts.py [--kills 20] [--machines 2] [--bits 1] [--seed 0] [--json FILE]

A small GPT trains under hsdp (replica=2, data=2) in four processes of `jaxshard launch`, two on each of two machines
that are simulated: they share no memory. SIGKILL hits one process after another, process 0 first and then at random, at
random moments. After `--kills` kills, `--machines` more take the memory of the victim's machine away too, and `--bits`
more flip a bit in the newest step that the victim has there. Beside it runs the same training without a kill.

Printed are, over all restarts: whether every loss has the same bits as without kills; the steps that were finished and
had to be taken again; and the seconds from the kill to the first new step, in four parts:

    detection    until the other processes have ended too
    start        until Python, JAX and the other processes are there, and the layout is made
    restore      until the run is on the devices again, from memory
    compilation  until the step is compiled (CPU devices share no compilation cache, so it is compiled each time), and
                 the first step is taken

Seconds of the clock depend on what else the machine does; CPU-seconds are those of all four processes together.
No file of a checkpoint is read, for there is none: the training is given no folder, every file that a process opens by
Python is noted, and Orbax, by which checkpoints are read, is not imported.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROCESSES = 4
PARTS = ("detection", "start", "restore", "compilation")
OF_CHECKPOINTS = ("manifest.json", "ocdbt", "_METADATA", "_CHECKPOINT_METADATA")


def train(folder: Path, steps: int) -> None:
    """The training, in each of the processes."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    import jax
    import numpy as np
    import optax

    import jaxshard as js

    attempt, me = int(os.environ["JAXSHARD_RESTARTS"]), int(os.environ["JAXSHARD_PROCESS_ID"])
    log = (folder / f"process-{me}.jsonl").open("a", buffering=1)

    def note(event: str, **more: Any) -> None:
        line = {"attempt": attempt, "event": event, "time": time.time(), "cpu": time.process_time()} | more
        log.write(json.dumps(line) + "\n")

    js.distributed.initialize()
    model = js.models.gpt(vocab=64, width=32, depth=2, heads=2, seq=16)
    tx = optax.adamw(1e-2)
    layout = js.layout(js.hsdp("replica", "data", min_size=0), js.make_mesh(replica=2, data=2), model.init, tx)

    class Source:
        batch = 8

        def rows(self, step: int, rows: np.ndarray[Any, Any]) -> Any:
            make = (np.random.default_rng([step, int(row)]).integers(0, 64, 17, np.int32) for row in rows)
            return {"tokens": np.stack(list(make))}

    step = js.make_step(model.loss, tx, layout)
    shapes = {"tokens": jax.ShapeDtypeStruct((Source.batch, 17), np.int32)}
    note("start")
    memory = js.MemoryCheckpointer(layout, dir=f"{os.environ['JAXSHARD_MEMORY']}/machine-{me // 2}")
    found = memory.restore()
    run = js.init(model.init, tx, layout, 0) if found is None else jax.block_until_ready(found[0])
    note("restore", step=None if found is None else int(run.step))
    step.compile(shapes)
    first = int(run.step) + 1

    def finished(number: int, run: js.TrainState) -> None:
        jax.block_until_ready(run)
        note("compilation" if number == first else "finished", step=number)

    def losses(record: js.Record) -> None:
        note("loss", step=record.step, loss=record.metrics["loss"].hex())

    batches = js.batches(Source(), layout, start=run.step)
    run = js.fit(run, step, batches, steps=steps, on_run=[finished, memory], callbacks=[losses])
    of_checkpoints = [name for name in opened if any(part in name for part in OF_CHECKPOINTS)]
    size = memory._segment.file.stat().st_size
    note("end", checkpoints=of_checkpoints, orbax="orbax.checkpoint" in sys.modules, segment=size)


class Notes:
    """What the processes have noted, read as it is written."""

    def __init__(self, folder: Path):
        self.files = [folder / f"process-{index}.jsonl" for index in range(PROCESSES)]
        self.lines: list[list[dict[str, Any]]] = [[] for _ in self.files]
        self._read = [0] * PROCESSES

    def update(self) -> None:
        """Read the lines that were added; what is left of a line by a process that was killed is passed over."""
        for index, file in enumerate(self.files):
            with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
                opened.seek(self._read[index])
                for line in opened.read().splitlines(keepends=True):
                    if line.endswith(b"\n"):
                        self._read[index] += len(line)
                        with contextlib.suppress(ValueError):
                            self.lines[index].append(json.loads(line))

    def first_step(self, attempt: int) -> int:
        """The first step that was taken in an attempt; 0 before."""
        return self._step(attempt, min, "compilation")

    def last_step(self, attempt: int) -> int:
        """The newest step that any process has finished in an attempt; 0 before."""
        return self._step(attempt, max, "compilation", "finished")

    def _step(self, attempt: int, choose: Any, *events: str) -> int:
        self.update()
        steps = (
            one["step"]
            for lines in self.lines
            for one in reversed(lines[-200:])
            if one["attempt"] == attempt and one["event"] in events
        )
        return int(choose(steps, default=0))


class Launch:
    """A `jaxshard launch` of the training."""

    def __init__(self, folder: Path, steps: int, restarts: int):
        self.folder, self.output = folder, (folder / "output").open("w")
        self.notes = Notes(folder)
        flags = ["-n", str(PROCESSES), "--max-restarts", str(restarts)]
        program = [sys.executable, __file__, "--train", str(folder), "--steps", str(steps)]
        self.memory = folder / "memory"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        environment |= {"JAXSHARD_MEMORY": self._make_memory()}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "jaxshard", "launch", *flags, "--", *program],
            env=environment, stdout=self.output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _make_memory(self) -> str:
        self.memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="restarts-"))
        return str(self.memory)

    def children(self) -> dict[int, int]:
        """The number of every process and the number that the system gave it."""
        found = {}
        for task in Path(f"/proc/{self.popen.pid}/task").glob("*/children"):
            for pid in map(int, task.read_text().split()):
                with contextlib.suppress(OSError, KeyError):
                    pairs = (pair.partition(b"=") for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                    found[int({name: value for name, _, value in pairs}[b"JAXSHARD_PROCESS_ID"])] = pid
        return found

    def wait_for(self, condition: Callable[[], Any], pause: float = 0.02) -> Any:
        end = time.monotonic() + 600
        while not (value := condition()):
            if self.popen.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the training ended before: {(self.folder / 'output').read_text()[-3000:]}")
            time.sleep(pause)
        return value

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self.output.close()
        shutil.rmtree(self.memory, ignore_errors=True)


def flip_a_bit(file: Path) -> None:
    """Flip a bit of the newest step in a segment, in the last byte of it that is not zero."""
    from jaxshard.checkpoint.memory.segment import open_segment

    segment = open_segment(file)
    slot = max((0, 1), key=lambda slot: record.step if (record := segment.record(slot)) else -1)
    content = segment._slot(slot)
    content[content.nonzero()[0][-1]] ^= 1


def kill(launch: Launch, attempt: int, victim: int, kind: str, after: int) -> dict[str, Any]:
    """Kill a process some steps after the start of an attempt, and wait until all have ended."""
    began = launch.wait_for(lambda: launch.notes.first_step(attempt))
    launch.wait_for(lambda: launch.notes.last_step(attempt) >= began + after)
    time.sleep(random.uniform(0.0, 0.1))
    pids = launch.children()
    os.kill(pids[victim], signal.SIGKILL)
    killed = time.time()
    gone = {str(pid) for pid in pids.values()}
    launch.wait_for(lambda: not any(is_alive(pid) for pid in gone), pause=0.01)
    ended = time.time()
    machine = launch.memory / f"machine-{victim // 2}"
    if kind == "machine":
        shutil.rmtree(machine)
    if kind == "bit":
        flip_a_bit(machine / f"process-{victim}")
    done = launch.notes.last_step(attempt)
    return {"victim": victim, "kind": kind, "killed": killed, "ended": ended, "finished": done}


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def describe(kills: list[dict[str, Any]], notes: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each restart the step that it went on from, the steps lost, and the seconds of its parts."""
    found = []
    for attempt, one in enumerate(kills, 1):
        events = [{e["event"]: e for e in lines if e["attempt"] == attempt} for lines in notes]
        times = {part: max(mine[part]["time"] for mine in events) for part in PARTS[1:]}
        marks = [one["killed"], one["ended"], *times.values()]
        cpu = [[0.0, *(mine[part]["cpu"] for part in PARTS[1:])] for mine in events]
        begin = {mine["restore"]["step"] for mine in events}
        assert len(begin) == 1, f"the processes go on from different steps: {begin}"
        found.append(
            {"victim": one["victim"], "kind": one["kind"], "finished": one["finished"], "from": begin.pop()}
            | {"seconds": {part: b - a for part, (a, b) in zip(PARTS, itertools.pairwise(marks), strict=True)}}
            | {"cpu_seconds": {p: sum(mine[i + 1] - mine[i] for mine in cpu) for i, p in enumerate(PARTS[1:])}}
        )
    return found


def losses_of(notes: list[list[dict[str, Any]]]) -> dict[int, set[str]]:
    """The losses of each step in all processes and attempts, as text of all bits."""
    losses: dict[int, set[str]] = {}
    for lines in notes:
        for one in lines:
            if one["event"] == "loss":
                losses.setdefault(one["step"], set()).add(one["loss"])
    return losses


def trained(steps: int, kinds: list[str]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Train with a kill of each kind, one after another: (the kills, what all processes noted)."""
    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(Path(folder), steps, len(kinds))
        try:
            kills = []
            for attempt, kind in enumerate(kinds):
                victim = 0 if attempt == 0 else random.randrange(PROCESSES)
                kills.append(kill(launch, attempt, victim, kind, random.randint(1, 8)))
                print(f"{kind}: process {victim} after step {kills[-1]['finished']}", file=sys.stderr, flush=True)
            status = launch.popen.wait(600)
            assert status == 0, Path(folder, "output").read_text()[-3000:]
            launch.notes.update()
            return kills, launch.notes.lines
        finally:
            launch.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--bits", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.train:
        train(flags.train, flags.steps)
        return
    random.seed(flags.seed)
    kinds = ["process"] * flags.kills + ["machine"] * flags.machines + ["bit"] * flags.bits
    steps = 15 * (len(kinds) + 1)
    _, whole = trained(steps, [])
    kills, notes = trained(steps, kinds)
    expected, mine = losses_of(whole), losses_of(notes)
    restarts = describe(kills, notes)
    ends = [one for lines in notes for one in lines if one["event"] == "end"]
    seconds = {part: [one["seconds"][part] for one in restarts] for part in PARTS}
    cpu = {part: [one["cpu_seconds"][part] for one in restarts] for part in PARTS[1:]}
    result = {
        "restarts": restarts,
        "steps": steps,
        "steps_compared": len(mine),
        "other_losses": sorted(step for step, found in mine.items() if found != expected[step]),
        "most_steps_lost": max(one["finished"] - one["from"] for one in restarts),
        "checkpoint_files_opened": sorted({name for one in ends for name in one["checkpoints"]}),
        "orbax_imported": any(one["orbax"] for one in ends),
        "bytes_per_process": max(one["segment"] for one in ends),
        "median_seconds": {part: statistics.median(values) for part, values in seconds.items()},
        "most_seconds": max(sum(one["seconds"].values()) for one in restarts),
        "median_cpu_seconds": {part: statistics.median(values) for part, values in cpu.items()},
        "cores": os.cpu_count(),
    }
    print(f"{len(restarts)} restarts, process 0 killed {sum(one['victim'] == 0 for one in restarts)} times")
    print(f"losses: {len(mine)} of {steps} steps compared, other bits in {len(result['other_losses'])}")
    lost = [one["finished"] - one["from"] for one in restarts]
    print(f"steps lost: none in {lost.count(0)} restarts, one in {lost.count(1)}, at most {max(lost)}")
    opened = "none" if not result["checkpoint_files_opened"] else str(result["checkpoint_files_opened"])
    print(f"files of checkpoints opened: {opened}; Orbax imported: {result['orbax_imported']}")
    print(f"memory: {result['bytes_per_process']:,} bytes per process, for two steps")
    for part in PARTS:
        more = f", {statistics.median(cpu[part]):6.2f} CPU-seconds in all" if part in cpu else ""
        print(f"{part:12} {statistics.median(seconds[part]):6.2f} s (median){more}")
    total = statistics.median(sum(one["seconds"].values()) for one in restarts)
    print(f"{'total':12} {total:6.2f} s (median), at most {result['most_seconds']:.2f} s, on {result['cores']} cores")
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
