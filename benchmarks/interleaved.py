"""CPU-seconds per step of competitors that take turns: the machinery of the benchmarks that compare.

Every competitor (`Variant`) lives in processes of its own, which build, compile and warm up and then wait. The parent
lets them take turns, a few steps at a time (A B C A B C ...), the others asleep, so that a machine that is busy for a
while is busy for all of them. A ratio is taken within one round, and the median of those ratios is what is reported.

CPU-seconds are the user and system time of all threads of all processes of a variant during its turn. There is one
core per device: a device's process is pinned to its own core, a process with two devices to both.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WARM_UP_STEPS = 3

Step = Callable[[], float]
Turns = dict[str, list["Turn"]]


class Variant(NamedTuple):
    """One competitor: `make_step(rank, meeting)` runs in each of its processes and returns what does a step.

    A step returns its process's loss. `meeting` names a file that does not exist yet, where the processes may meet.
    `reference` is the variant that this one is divided by, `target` the largest ratio that is wanted.
    """

    name: str
    make_step: Callable[[int, str], Step]
    devices: int = 1
    processes: int = 1
    reference: str | None = None
    target: float | None = None


class Turn(NamedTuple):
    """CPU-seconds and seconds per step of one turn, and the loss of its last step."""

    cpu: float
    wall: float
    loss: float


def work(variants: Sequence[Variant], task: str) -> None:
    """Is one process of the variant in `task`: answers each number of steps on stdin by one JSON line."""
    name, rank, meeting, cores = json.loads(task)
    if cores:
        os.sched_setaffinity(0, cores)  # before a library counts the cores to size its thread pools
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints may be taken for an answer
    step = next(variant for variant in variants if variant.name == name).make_step(rank, meeting)
    for line in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        losses = [step() for _ in range(int(line))]
        print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall, losses[-1]]), file=answers, flush=True)
    os._exit(0)  # the other ranks may be gone already, and libraries wait for them on the way out


class Workers:
    """The running processes of one variant: this very command once more, with `--worker TASK`."""

    def __init__(self, variant: Variant, meeting: str, cores: Sequence[int], environment: dict[str, str]):
        self.name = variant.name
        share = variant.devices // variant.processes
        tasks = [
            json.dumps([variant.name, rank, meeting, cores[rank * share : (rank + 1) * share]])
            for rank in range(variant.processes)
        ]
        self.processes = [
            subprocess.Popen(
                [sys.executable, *sys.argv, "--worker", task],
                env=os.environ | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for task in tasks
        ]

    def run(self, steps: int) -> Turn:
        for process in self.processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [json.loads(process.stdout.readline() or "null") for process in self.processes]
        if None in answers:
            raise SystemExit(f"{self.name}: a process ended; what it printed stands above")
        cpu, wall, loss = zip(*answers, strict=True)
        # Every process has the same number of tokens, so the mean of their losses is the loss of the global batch.
        return Turn(sum(cpu) / steps, max(wall) / steps, statistics.fmean(loss))

    def stop(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:  # it waits for a rank that is gone
                process.kill()


def free_cores(count: int) -> list[int]:
    """The first `count` cores that this process may use, for pinning; none where the system does not pin."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))[:count]
    if len(cores) < count:
        raise SystemExit(f"{count} cores are needed, one per device, but this process may use {len(cores)}")
    return cores


def measure(
    variants: Sequence[Variant], rounds: int, steps: int, cores: Sequence[int], environment: dict[str, str]
) -> Turns:
    """The turns of every variant, one per round of `steps` steps."""
    turns: Turns = {variant.name: [] for variant in variants}
    with tempfile.TemporaryDirectory() as folder:
        all_workers: list[Workers] = []
        try:
            for number, variant in enumerate(variants):
                all_workers.append(Workers(variant, str(Path(folder, f"meeting-{number}")), cores, environment))
                turn = all_workers[-1].run(WARM_UP_STEPS)
                print(f"{variant.name}: warm, loss {turn.loss:.6f} after {WARM_UP_STEPS} steps", flush=True)
            for number in range(rounds):
                for workers in all_workers:
                    turns[workers.name].append(workers.run(steps))
                took = ", ".join(f"{of_one[-1].cpu:.3f}" for of_one in turns.values())
                print(f"round {number + 1} of {rounds}: CPU-seconds per step {took}", flush=True)
        finally:
            for workers in all_workers:
                workers.stop()
    return turns


def check_losses(turns: Turns, variants: Sequence[Variant]) -> None:
    """Fails unless every variant trained what its reference trained: the same losses, rounding apart."""
    for variant in variants:
        for number, turn in enumerate(turns[variant.name]):
            expected = turns[variant.reference or variant.name][number].loss
            if not math.isclose(turn.loss, expected, rel_tol=1e-3):
                raise SystemExit(
                    f"{variant.name}: loss {turn.loss} in round {number + 1}, but {variant.reference} has {expected}: "
                    "they do not train the same model"
                )


def report(turns: Turns, variants: Sequence[Variant]) -> dict[str, dict[str, Any]]:
    """Prints a table and returns its rows, with the ratio of every round.

    "least" is the ratio of the cheapest turns of both: on a busy machine a turn can only be made dearer, so where it
    is far from the median, the machine was too busy to trust either.
    """
    rows = {}
    print(f"\n| {'':24} | CPU-s/step | s/step | ratio | quartiles   | least | target  |")
    print(f"|{'-' * 26}|-----------:|-------:|------:|-------------|------:|---------|")
    for variant in variants:
        mine = turns[variant.name]
        cpu, wall = (statistics.median(turn[i] for turn in mine) for i in range(2))
        row: dict[str, Any] = {"cpu_seconds_per_step": cpu, "seconds_per_step": wall}
        ratio = quartiles = least = target = ""
        if variant.reference is not None:
            bases = turns[variant.reference]
            ratios = [turn.cpu / base.cpu for turn, base in zip(mine, bases, strict=True)]
            cheapest = min(turn.cpu for turn in mine) / min(base.cpu for base in bases)
            low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
            row |= {"reference": variant.reference, "ratio": median, "quartiles": [low, high], "least": cheapest}
            row |= {"ratios": ratios}
            ratio, quartiles, least = f"{median:.2f}", f"{low:.2f} - {high:.2f}", f"{cheapest:.2f}"
        if variant.target is not None:
            row |= {"target": variant.target}
            target = f"<= {variant.target:.2f}"
        print(
            f"| {variant.name:24} | {cpu:10.3f} | {wall:6.3f} | {ratio:>5} | {quartiles:11} | {least:>5} | {target:7} |"
        )
        rows[variant.name] = row
    return rows
