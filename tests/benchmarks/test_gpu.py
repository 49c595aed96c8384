"""The benchmark for one GPU runs where there is none, at tiny sizes."""

import json
import os
import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS


@pytest.mark.slow
def test_the_smoke_run_measures_ours_and_says_what_is_left_out(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--json", str(out)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(BENCHMARKS.parent)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    result = json.loads(out.read_text())
    sides = result["models"]["tiny"]["sides"]
    assert sides["tiny jaxshard"]["tokens_per_second"] > 0 and sides["tiny jaxshard"]["loss"] < 5.6  # ln 256
    if "torch" in result["versions"]:
        assert sides["tiny torch"]["tokens_per_second"] > 0 and sides["tiny torch"]["loss"] < 5.6
    else:
        assert "torch is not installed: its half is left out" in printed
