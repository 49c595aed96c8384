"""Inputs that no honest program writes: refused in one line, soon, and in little memory."""

import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read as on Linux")
def test_hostile_inputs_are_refused():
    """In a process of its own, which has no threads yet when it forks."""
    command = [sys.executable, "-m", "tests.hostile"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert found.returncode == 0, found.stdout + found.stderr
