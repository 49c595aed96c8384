"""Every notebook runs top to bottom, and shows the pictures that it promises."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
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


def check_output(pictures: int, text: str) -> None:
    assert pictures == 2
    spread = float(text.split("largest relative difference from ddp:")[1].split()[0])
    assert spread < 1e-4  # Adam amplifies rounding: thirty steps of it
    assert "over replica x data" in text


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 1])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_run_and_draw(path: Path, devices: int) -> None:
    """In this process, for three steps instead of thirty, on all devices and as on a single GPU."""
    plt.switch_backend("Agg")
    plt.close("all")
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    code = "\n".join(cell for cell in cells if "%pip" not in cell)
    assert code.count("steps=30") == code.count("jax.device_count()") == code.count("make_mesh(") == 1
    code = code.replace("jax.device_count()", str(devices))
    code = code.replace("make_mesh(", f"make_mesh(jax.devices()[:{devices}], ")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code.replace("steps=30", "steps=3"), str(path), "exec"), namespace)
    check_output(len(plt.get_fignums()), printed.getvalue())
    plt.close("all")


GIT = "git+https://github.com/jaxshard/jaxshard"
WHEEL = "file:///wheels/jaxshard-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("source", "gpu", "requirement"),
    [
        (None, False, f"jaxshard[viz] @ {GIT}"),
        (None, True, f"jaxshard[viz,cuda12] @ {GIT}"),
        (WHEEL, False, f"jaxshard[viz] @ {WHEEL}"),
        ("jaxshard", True, "jaxshard[viz,cuda12]"),
    ],
)
def test_the_first_cell_installs_from_where_the_variable_says(
    path: Path, source: str | None, gpu: bool, requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = (cell.source for cell in nbformat.read(path, as_version=4).cells if "%pip" in cell.source)
    magic = '%pip install --quiet "$requirement"'
    assert cell.count("%") == cell.count(magic) == 1
    monkeypatch.delenv("JAXSHARD", raising=False)
    if source is not None:
        monkeypatch.setenv("JAXSHARD", source)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(os.path, "exists", lambda path: gpu and path == "/dev/nvidia0")
    installed: list[str] = []
    exec(cell.replace(magic, "install(requirement)"), {"install": installed.append})
    assert installed == [requirement]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_draws(path, tmp_path, monkeypatch):
    """In Jupyter's kernel, as it stands."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = os.environ.get("XLA_FLAGS", "").split()
    monkeypatch.setenv("XLA_FLAGS", " ".join(flag for flag in flags if "device_count" not in flag))
    out = tmp_path / path.name
    result = subprocess.run(
        [sys.executable, "-c", EXECUTE, path, out], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    cells = nbformat.read(out, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    check_output(len(pictures), "".join(output.get("text", "") for output in outputs))


def test_notebooks_are_committed_without_outputs():
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        assert not [cell for cell in notebook.cells if cell.get("outputs")], path.name
