"""`jaxshard train` of which a process is killed goes on, and ends as if nothing had happened, bit for bit."""

import json
import random
import sys

import pytest

import jaxshard as js
from tests.distributed.killing import alive, check, finished, kill, kill_any, launch, stop

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def train(tmp_path, steps):
    """The command, and the flags of a run that goes on."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(300)))
    command = [sys.executable, "-m", "jaxshard", "train", "--data", text, "--devices", 2, "--seq", 16, "--batch", 8]
    command += ["--steps", steps, "--eval-every", steps, "--checkpoint-every", 2, "--keep", 3, "--sample", 0]
    log, result = tmp_path / "run.log", tmp_path / "run.json"
    return command, ["--checkpoint", tmp_path / "run", "--resume", "--log", log, "--json", result]


def compare(tmp_path, command, steps, kills, processes_of_the_whole):
    """Compares a run that ended with one that was not disturbed: every loss, the evaluation and the last step saved."""
    whole = ["--checkpoint", tmp_path / "whole", "--log", tmp_path / "whole.log", "--json", tmp_path / "whole.json"]
    finished(launch(*command, *whole, count=processes_of_the_whole))
    check(tmp_path / "run.log", tmp_path / "whole.log", kills)
    mine, expected = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "whole.json"))
    assert mine["losses"] == expected["losses"][mine["start"] :] and mine["loss_eval"] == expected["loss_eval"]
    assert js.latest_step(tmp_path / "run", intact=True) == steps


def killed(tmp_path, moments, steps, processes_of_the_whole):
    """Two processes that are killed at these moments, beside a run that is not interrupted."""
    folder, log = tmp_path / "run", tmp_path / "run.log"
    command, flags = train(tmp_path, steps)
    program = launch(*command, *flags, count=2, restarts=len(moments))
    pids = kill(program, 2, moments, folder, log)
    output = finished(program)
    assert output.count("was ended by SIGKILL; ending the others") == len(moments)
    compare(tmp_path, command, steps, len(moments), processes_of_the_whole)
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_a_kill_changes_nothing(tmp_path):
    """The whole run is one process with two devices: of two numbers the sum has the same bits in either order."""
    killed(tmp_path, ["save"], 12, 1)


@pytest.mark.slow(sampled=False)  # many minutes
@pytest.mark.parametrize("seed", [0])
def test_kills_of_any_process_change_nothing(seed, tmp_path):
    """Workers, process 0 and the launcher, at their start, in a step and while they save; first in the first save."""
    rng = random.Random(seed)
    kills = [(victim, moment) for victim in ("worker", "process 0", "launcher") for moment in ("start", "step", "save")]
    rng.shuffle(kills)
    kills = [("process 0", "save"), *kills, *rng.choices(kills, k=2)]
    command, flags = train(tmp_path, 60)
    with (tmp_path / "output").open("a") as output:

        def start():
            return launch(*command, *flags, count=2, restarts=len(kills), output=output)

        program, pids, lines = kill_any(start, 2, kills, seed, tmp_path / "run", tmp_path / "run.log")
        status = program.wait(600)
    print(*lines, sep="\n")
    assert status == 0, (tmp_path / "output").read_text()
    compare(tmp_path, command, 60, len(kills), 1)
    assert not any(map(alive, pids))


@pytest.mark.slow(sampled=False)  # minutes each
@pytest.mark.parametrize(("victim", "restarts"), [(1, 1), (0, 1), ("launcher", 0)])
def test_a_process_that_is_stopped_for_90_seconds_changes_nothing(victim, restarts, tmp_path):
    """The other one gives it up after 30 seconds, and all start again; without the launcher they just go on."""
    command, flags = train(tmp_path, 60)
    program = launch(*command, *flags, count=2, restarts=restarts)
    pids = stop(program, 2, victim, 90, tmp_path / "run", tmp_path / "run.log")
    output = finished(program)
    assert output.count("starting all again, 1 of 1") == restarts
    compare(tmp_path, command, 60, restarts, 1)
    assert not any(map(alive, pids))
