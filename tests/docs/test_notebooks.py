"""Every notebook runs top to bottom, and shows the pictures that it promises."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# In a process of its own: the kernel's client libraries warn about themselves.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_draws(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = os.environ.get("XLA_FLAGS", "").split()  # those of the fast tests, without a number of devices
    monkeypatch.setenv("XLA_FLAGS", " ".join(flag for flag in flags if "device_count" not in flag))
    out = tmp_path / path.name
    result = subprocess.run(
        [sys.executable, "-c", EXECUTE, path, out], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    notebook = nbformat.read(out, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 2
    text = "".join(output.get("text", "") for output in outputs)
    spread = float(text.split("largest relative difference from ddp:")[1].split()[0])
    assert spread < 1e-4  # Adam amplifies rounding: thirty steps of it
    assert "over replica x data" in text


def test_notebooks_are_committed_without_outputs():
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        assert not [cell for cell in notebook.cells if cell.get("outputs")], path.name
