"""Kills or stops processes of a `jaxshard launch` at random moments, and says what the run was like."""

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


def launch(*command, count, restarts=0, output=subprocess.PIPE, **environment):
    """A started `jaxshard launch` of a command, in a process of its own."""
    flags = ["-n", str(count), "--max-restarts", str(restarts)]
    arguments = [sys.executable, "-m", "jaxshard", "launch", *flags, "--", *map(str, command)]
    environment = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | environment
    return subprocess.Popen(arguments, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT, text=True)


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


def kill_any(start, count, kills, seed, folder, log):
    """Kills one process after another, the launcher among them, and starts that again.

    After each kill all processes must be gone or on their way again within `SURVIVE` seconds, and the newest saved step
    must be intact and no older than before.

    Args:
      start: starts a launch, which goes on from the newest saved step.
      count: how many processes one launch has.
      kills: pairs (victim, moment): "process 0", "worker" or "launcher", at one of the moments of `kill`.
      seed: of the random times.
      folder: of the checkpoints.
      log: of the run.

    Returns:
      The last launch, the numbers of all processes, and a line per kill.
    """
    rng, seen, lines, program = random.Random(seed), set(), [], start()
    for victim, moment in kills:
        pids = _until(program, lambda program=program, seen=seen: _new_children(program, seen, count))
        seen, began = seen | pids, time.time()
        before = js.latest_step(folder) or 0
        _wait_for(moment, program, rng, folder, log, began)
        first = min(pids, key=process_index)
        pid = {"launcher": program.pid, "process 0": first, "worker": max(pids - {first})}[victim]
        partly = _is_saving(folder, began)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        if victim == "launcher":
            program.wait(SURVIVE)
        while any(map(alive, pids)):
            assert time.monotonic() - killed < SURVIVE, "one of the others is still there"
            time.sleep(0.01)
        gone = time.monotonic() - killed
        newest = js.latest_step(folder)
        assert (newest or 0) >= before, "a step that was saved is lost"
        assert js.latest_step(folder, intact=True) == newest, "the newest step is damaged"
        half = ", a save half written" if partly else ""
        lines.append(f"{victim} at {moment}{half}: all gone after {gone:.1f} s, newest step {newest}")
        if victim == "launcher":
            program = start()
    return program, seen, lines


def stop(program, count, victim, seconds, folder, log):
    """Stops a process of a launch (SIGSTOP) after some steps, and lets it go on (SIGCONT) some seconds later.

    Returns:
      The numbers of the processes that were there when it was stopped.
    """
    pids = _until(program, lambda: _new_children(program, set(), count))
    _wait_for("step", program, random.Random(0), folder, log, time.time())
    pid = {process_index(pid): pid for pid in pids}[victim] if victim != "launcher" else program.pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):  # the launcher has killed it, as one whose siblings have ended
        os.kill(pid, signal.SIGCONT)
    return pids


def process_index(pid):
    """The number of a process among those that were launched with it."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)[b"JAXSHARD_PROCESS_ID"])


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
