"""The benchmark for one GPU runs where there is none, at tiny sizes, and keeps to its minutes."""

import json
import os
import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS

MODEL_ROWS = ["tiny bf16", "tiny fp8", "tiny torch bf16", "tiny torch fp8"]
ROWS = {
    *MODEL_ROWS,
    *(f"{name} memory" for name in MODEL_ROWS),
    "tiny replicas",
    "calls",
    *(f"attention tiny, {name}" for name in ("cudnn", "splash", "blocks", "all logits")),
}


def smoke(file, minutes):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--smoke", "--minutes", str(minutes), "--json", str(file)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(BENCHMARKS.parent)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(file.read_text())["rows"], printed


def test_rows_that_do_not_fit_the_minutes_are_skipped_and_measured_ones_kept(tmp_path):
    file = tmp_path / "gpu.json"
    rows, printed = smoke(file, 0)
    assert set(rows) == ROWS
    assert "0 s were left" in rows["calls"]["skipped"] and "calls: skipped takes about" in printed
    # The machine that a later run compares with is the line that the command begins with.
    machine = dict(word.split(" ", 1) for word in printed.splitlines()[0].split(", "))
    measured, elsewhere = {"ratio": 1.5, "machine": machine}, {"ratio": 1.5, "machine": machine | {"jax": "0.1"}}
    file.write_text(json.dumps({"rows": rows | {"calls": measured, "tiny replicas": elsewhere}}))
    rows, printed = smoke(file, 0)
    assert rows["calls"] == measured and "calls: measured already" in printed
    assert "skipped" in rows["tiny replicas"]


@pytest.mark.slow
def test_the_smoke_run_measures_every_row_or_says_what_is_missing(tmp_path):
    rows, printed = smoke(tmp_path / "gpu.json", 30)
    assert set(rows) == ROWS
    assert rows["tiny bf16"]["tokens_per_second"] > 0 and rows["tiny bf16"]["loss"] < 5.6  # ln 256
    assert rows["tiny bf16 memory"]["compiled_bytes"] > rows["tiny replicas"]["bytes_read"] > 0
    assert rows["calls"]["step_microseconds"] > 0 and rows["calls"]["plain_jit_microseconds"] > 0
    for name in ("blocks", "all logits"):
        assert rows[f"attention tiny, {name}"]["temporary_bytes"] > 0
    assert "TPUs" in rows["attention tiny, splash"]["not available"]
    for name in ("tiny fp8", "tiny torch bf16", "tiny torch fp8"):
        row = rows[name]
        assert row.get("loss", 9) < 5.6 or row["not available"], name
    assert "| tiny bf16 |" in printed
