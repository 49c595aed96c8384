"""Kills processes of a `jaxshard launch` at random moments, and says what the run was like."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import jaxshard as js
from jaxshard.checkpoint.manifest import MANIFEST

SURVIVE = 30
"""Seconds in which those whose sibling was killed must be gone."""
STUCK = 240
"""Seconds after which a launch that does nothing is broken."""


def launch(*command, count, restarts=0, **environment):
    """A started `jaxshard launch` of a command, in a process of its own."""
    flags = ["-n", str(count), "--max-restarts", str(restarts)]
    arguments = [sys.executable, "-m", "jaxshard", "launch", *flags, "--", *map(str, command)]
    environment = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | environment
    return subprocess.Popen(
        arguments, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(program):
    """What a launch printed, once it ended with 0."""
    output, _ = program.communicate(timeout=2 * STUCK)
    assert program.returncode == 0, output
    return output


def losses(log):
    """[(step, loss)] in the order of the log, with the steps that were taken again."""
    records = [json.loads(line) for line in Path(log).read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]


def kill(program, count, moments, folder, log):
    """Kills one of the processes of a launch at each of the moments, and waits for the survivors' end.

    Moments are "start" (soon after it was started), "step" (after some steps) and "save" (while a step is written).
    """
    rng = random.Random(len(moments))
    seen = set()
    for moment in moments:
        pids = _until(program, lambda seen=seen: _new_children(program, seen, count))
        seen, began = seen | pids, time.time()
        before = js.latest_step(folder) or 0
        _wait_for(moment, program, rng, folder, log, began)
        victim = rng.choice(sorted(pids))
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        _until(program, lambda pids=pids: not any(map(alive, pids)))
        assert time.monotonic() - killed < SURVIVE
        assert (js.latest_step(folder) or 0) >= before, "a step that was saved is lost"
    return seen


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def check(log, expected, kills):
    """Every step of every attempt has the loss that it has in a run without kills, and no step was left out.

    A step may miss in the log where it was saved and process 0 killed before it wrote the line.
    """
    taken, reference = losses(log), dict(losses(expected))
    wrong = [(step, loss, reference[step]) for step, loss in taken if loss != reference[step]]
    assert not wrong, f"other losses than without kills: {wrong}"
    missing = set(reference) - {step for step, _ in taken}
    assert len(missing) <= kills and not any(step % 2 for step in missing), missing
    assert taken[-1][0] == max(reference)
    assert sum(after <= before for (before, _), (after, _) in pairwise(taken)) <= kills


def _wait_for(moment, program, rng, folder, log, began):
    if moment == "start":
        time.sleep(rng.uniform(0.0, 4.0))
    elif moment == "step":
        lines = _lines(log) + rng.randint(1, 5)
        _until(program, lambda: _lines(log) >= lines)
        time.sleep(rng.uniform(0.0, 0.2))
    else:
        _until(program, lambda: _is_saving(folder, began), look=0.0005)
        time.sleep(rng.uniform(0.0, 0.05))


def _is_saving(folder, began):
    """Whether a step is being written, other than what an earlier kill left behind."""
    for step in Path(folder).glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if step.name.isdecimal() and not (step / MANIFEST).exists() and step.stat().st_mtime > began:
                return True
    return False


def _lines(log):
    return Path(log).read_bytes().count(b"\n") if Path(log).exists() else 0


def _children(program):
    tasks = Path(f"/proc/{program.pid}/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def _new_children(program, seen, count):
    new = _children(program) - seen
    return new if len(new) == count else None


def _until(program, condition, look=0.01):
    end = time.monotonic() + STUCK
    while not (found := condition()):
        assert program.poll() is None, f"it ended before: {program.communicate()[0]}"
        assert time.monotonic() < end, "it never happened"
        time.sleep(look)
    return found
