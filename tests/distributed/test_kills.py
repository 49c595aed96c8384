"""A run of which a process is killed goes on, and ends as if nothing had happened, bit for bit."""

import sys

import pytest

import jaxshard as js
from tests.distributed.killing import alive, check, finished, kill, launch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def test_three_kills_change_nothing(tmp_path):
    command, steps = [sys.executable, "-m", "tests.distributed.small"], 24
    finished(launch(*command, tmp_path / "whole", tmp_path / "whole.log", steps, count=2))
    folder, log = tmp_path / "run", tmp_path / "run.log"
    program = launch(*command, folder, log, steps, count=2, restarts=3)
    pids = kill(program, 2, ["save", "start", "step"], folder, log)
    finished(program)
    check(log, tmp_path / "whole.log", 3)
    assert js.latest_step(folder, intact=True) == steps and not any(map(alive, pids))
