"""Processes that were killed go on from memory or from a checkpoint, with the same losses, bit for bit."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

import jaxshard as js
from tests.distributed.killing import alive, finished, launch, losses, new_children, process_index, until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def train(tmp_path, steps):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(300)))
    command = [sys.executable, "-m", "jaxshard", "train", "--data", text, "--devices", 4, "--seq", 16, "--batch", 8]
    command += ["--mesh", "replica=2,data=2", "--strategy", "hsdp", "--change", "depth=2,width=16,heads=2"]
    return [*command, "--steps", steps, "--eval-every", steps, "--sample", 0]


def killed(tmp_path, how, victims, steps):
    """Four processes of which one after another is killed, beside a run that is not disturbed."""
    command, log, rng = train(tmp_path, steps), tmp_path / "run.log", random.Random(0)
    kept = {"memory": ["--memory-every", 1], "checkpoint": ["--checkpoint", tmp_path / "run", "--checkpoint-every", 1]}
    flags = [*kept[how], *["--resume"] * (how == "checkpoint"), "--log", log, "--json", tmp_path / "run.json"]
    program, seen = launch(*command, *flags, count=4, restarts=len(victims)), set()
    for victim in victims:
        pids = until(program, lambda seen=seen: new_children(program, seen, 4))
        seen = seen | pids
        steps_then = len(losses(log)) + rng.randint(2, 5)
        until(program, lambda steps_then=steps_then: len(losses(log)) >= steps_then)
        time.sleep(rng.uniform(0.0, 0.2))
        os.kill({process_index(pid): pid for pid in pids}[victim], signal.SIGKILL)
        until(program, lambda pids=pids: not any(map(alive, pids)))
    output = finished(program)
    assert output.count("was ended by SIGKILL; ending the others") == len(victims)
    assert output.count("; goes on from step ") == len(victims)
    finished(launch(*command, "--log", tmp_path / "whole.log", "--json", tmp_path / "whole.json", count=4))
    taken, reference = losses(log), dict(losses(tmp_path / "whole.log"))
    assert all(loss == reference[step] for step, loss in taken)
    missing = set(reference) - {step for step, _ in taken}  # process 0 was killed before it wrote the line
    again = len(taken) - len(reference) + len(missing)
    # A checkpoint may have been under way, and then the one before counts.
    most = len(victims) * (1 if how == "memory" else 2)
    assert len(missing) <= victims.count(0) and again <= most, (missing, again)
    mine, expected = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "whole.json"))
    assert mine["loss_eval"] == expected["loss_eval"]
    if how == "checkpoint":
        assert js.latest_step(tmp_path / "run", intact=True) == steps
        return
    memory = next(line.split()[2] for line in output.splitlines() if line.startswith("[0]   memory "))
    assert not Path(memory.rstrip(",")).exists(), "the launcher removes it at the end"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["memory", "checkpoint"])
def test_a_kill_of_process_0_changes_nothing(how, tmp_path):
    killed(tmp_path, how, [0], 12)


@pytest.mark.slow(sampled=False)  # many minutes; benchmarks/restarts.py shows twenty
def test_four_kills_change_nothing(tmp_path):
    killed(tmp_path, "memory", [0, 3, 1, 2], 32)
