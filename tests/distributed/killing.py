"""The processes of a `jaxshard launch`: who they are, whether they live, and what their run was like."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

STUCK = 240
"""Seconds after which a launch that does nothing is broken."""


def launch(*command, count, restarts=0):
    """Start a `jaxshard launch` of a command, in a process of its own."""
    flags = ["-n", str(count), "--max-restarts", str(restarts)]
    arguments = [sys.executable, "-m", "jaxshard", "launch", *flags, "--", *map(str, command)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finished(program):
    """Return what a launch printed, once it ended with 0."""
    output, _ = program.communicate(timeout=2 * STUCK)
    assert program.returncode == 0, output
    return output


def losses(log):
    """Return [(step, loss)] in the order of the log, with the steps that were taken again; none if it is not there."""
    lines = Path(log).read_text().split("\n")[:-1] if Path(log).exists() else []
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["loss"]) for record in records]


def process_index(pid):
    """Return the number of a process among those that were launched with it."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)[b"JAXSHARD_PROCESS_ID"])


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def new_children(program, seen, count):
    """Return the processes of a launch that were not seen before, once there are so many."""
    tasks = Path(f"/proc/{program.pid}/task").glob("*/children")
    new = {int(pid) for task in tasks for pid in task.read_text().split()} - seen
    return new if len(new) == count else None


def until(program, condition):
    """Wait for a condition while a launch runs, and return what it found."""
    end = time.monotonic() + STUCK
    while not (found := condition()):
        assert program.poll() is None, f"it ended before: {program.communicate()[0]}"
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
    return found
