"""A run of which a process is killed goes on, and ends as if nothing had happened, bit for bit."""

import sys

import jax
import pytest

import jaxshard as js
from tests.distributed import small
from tests.distributed.killing import alive, check, finished, kill, launch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def test_three_kills_change_nothing(tmp_path, compiling):
    folder, log, steps = tmp_path / "run", tmp_path / "run.log", 24
    command = [sys.executable, "-m", "tests.distributed.small", folder, log, steps]
    program = launch(*command, count=2, restarts=3)
    pids = kill(program, 2, ["save", "start", "step"], folder, log)
    finished(program)
    # One process with two devices: of two numbers the sum has the same bits in either order.
    small.train(tmp_path / "whole", tmp_path / "whole.log", steps, js.make_mesh(jax.devices()[:2], data=-1))
    check(log, tmp_path / "whole.log", 3)
    assert js.latest_step(folder, intact=True) == steps and not any(map(alive, pids))
