"""`jaxshard train` of which a process is killed goes on, and ends as if nothing had happened, bit for bit."""

import json
import sys

import pytest

import jaxshard as js
from tests.distributed.killing import alive, check, finished, kill, launch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def killed(tmp_path, moments, steps, processes_of_the_whole):
    """Two processes that are killed at these moments, beside a run that is not interrupted."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(300)))
    folder, log, result = tmp_path / "run", tmp_path / "run.log", tmp_path / "run.json"
    command = [sys.executable, "-m", "jaxshard", "train", "--data", text, "--devices", 2, "--seq", 16, "--batch", 8]
    command += ["--steps", steps, "--eval-every", steps, "--checkpoint-every", 2, "--keep", 3, "--sample", 0]
    flags = ["--checkpoint", folder, "--resume", "--log", log, "--json", result]
    program = launch(*command, *flags, count=2, restarts=len(moments))
    pids = kill(program, 2, moments, folder, log)
    output = finished(program)
    assert output.count("was ended by SIGKILL; ending the others") == len(moments)
    whole = ["--checkpoint", tmp_path / "whole", "--log", tmp_path / "whole.log", "--json", tmp_path / "whole.json"]
    finished(launch(*command, *whole, count=processes_of_the_whole))
    check(log, tmp_path / "whole.log", len(moments))
    mine, expected = (json.loads(file.read_text()) for file in (result, tmp_path / "whole.json"))
    assert mine["losses"] == expected["losses"][mine["start"] :] and mine["loss_eval"] == expected["loss_eval"]
    assert js.latest_step(folder, intact=True) == steps and not any(map(alive, pids))


def test_a_kill_changes_nothing(tmp_path):
    """The whole run is one process with two devices: of two numbers the sum has the same bits in either order."""
    killed(tmp_path, ["save"], 12, 1)


@pytest.mark.slow
def test_three_kills_change_nothing(tmp_path):
    killed(tmp_path, ["save", "start", "step"], 20, 1)


@pytest.mark.slow(sampled=False)  # many minutes
def test_twenty_kills_change_nothing(tmp_path):
    killed(tmp_path, ["step", "save", "start", "save"] * 5, 80, 2)
