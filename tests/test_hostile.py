"""A sample of the inputs of tests/hostile.py; `python -m tests.hostile` runs all of them."""

import subprocess
import sys

import pytest

from tests.hostile import hostile_inputs


def test_there_are_at_least_150_inputs():
    names = [one.name for one in hostile_inputs()]
    assert len(set(names)) == len(names) >= 150


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hlo groups", "hlo calls", "hlo sums", "config gemma3", "flags", "tokenizer"])
def test_hostile_inputs_are_refused_in_one_line(kind):
    ran = subprocess.run([sys.executable, "-m", "tests.hostile", kind], capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
