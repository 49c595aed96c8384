"""Every notebook runs top to bottom, as it is stored; each begins with the cell that installs what is missing."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
MOST_BYTES = 3_000_000
PUBLIC = {"jax", "flax", "optax", "numpy", "matplotlib", "jaxshard"}


def cells_of(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def first_cell(path: Path) -> str:
    (cell,) = (cell.source for cell in cells_of(path) if "%pip" in cell.source)
    return cell


def kinds_of(cells: list[Any]) -> list[list[list[str]]]:
    """What each cell shows: the kinds of every output, "stdout" for text."""
    return [[sorted(output.get("data", [output.get("name")])) for output in cell.outputs] for cell in cells]


def printed_by(cells: list[Any]) -> str:
    return "".join(output.text for cell in cells for output in cell.outputs if "text" in output)


def execute(path: Path, folder: Path) -> list[Any]:
    """The cells after an execution in a kernel; any warning or error in one fails."""
    command = [sys.executable, str(ROOT / "docs" / "execute_notebooks.py"), str(path), "--into", str(folder)]
    environment = os.environ | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return cells_of(folder / path.name)


SHOWN = {
    "01_quickstart": [r"ference from ddp: (\S+)e-0[5-9]", "all 77 arrays agree", "step 40"],
    "02_zero_memory": [r"fsdp +2\.\d+ bytes for each", *(rf"{name} .*as promised: True" for name in ("ddp", "fsdp"))],
    "03_tensor_parallelism": ["all-reduce +tensor", r"data=2, tensor=4 .* all \d+ arrays agree"],
    "04_pipelines": ["refused: ", r"ference of ten losses: (\S+)e-0[5-9]"],
    "05_plan_a_pod": ["70,553,706,496 parameters", r"million at least", "fits: True|libtpu is not installed"],
    "06_fine_tuning": [r"-> +\d+ \. </s>", r"\d of 5 are right", "answers the same: True"],
}
"""Patterns of what each notebook prints, in their order."""


def test_every_notebook_is_known():
    assert list(SHOWN) == [path.stem for path in NOTEBOOKS]


@pytest.mark.slow
@EACH
def test_a_notebook_runs_as_it_is_and_shows_what_is_stored(path: Path, tmp_path: Path) -> None:
    executed = execute(path, tmp_path)
    assert kinds_of(executed) == kinds_of(cells_of(path))
    assert re.search(".*".join(SHOWN[path.stem]), printed_by(executed), re.DOTALL), printed_by(executed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["01_quickstart", "02_zero_memory", "06_fine_tuning"])
def test_what_takes_the_devices_that_are_there_runs_on_one(name: str, tmp_path: Path) -> None:
    """As on a single GPU. The other notebooks simulate devices, or use none."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    eight = 'jax.config.update("jax_num_cpu_devices", 8)'
    assert sum(cell.source.count(eight) for cell in notebook.cells) == 1
    for cell in notebook.cells:
        cell.source = cell.source.replace(eight, eight.replace("8", "1")).replace("steps=30", "steps=3")
    (tmp_path / "run").mkdir()
    nbformat.write(notebook, tmp_path / "run" / "one.ipynb")
    assert printed_by(execute(tmp_path / "run" / "one.ipynb", tmp_path)).startswith("1 devices")


@EACH
def test_notebooks_are_stored_with_the_outputs_of_one_execution(path: Path) -> None:
    cells = cells_of(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert not [cell.id for cell in cells if "execution" in cell.metadata]
    assert any({"image/png", "text/html"} & set(output.get("data", ())) for output in outputs)


def test_the_notebooks_are_small():
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MOST_BYTES


@EACH
def test_notebooks_use_public_names_alone(path: Path) -> None:
    after_install = [cell.source for cell in cells_of(path) if "%pip" not in cell.source]
    for node in ast.walk(ast.parse("\n".join(after_install))):
        if isinstance(node, ast.Attribute | ast.Name):
            assert not (node.attr if isinstance(node, ast.Attribute) else node.id).startswith("__")
            assert not isinstance(node, ast.Attribute) or not node.attr.startswith("_"), node.attr
        names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in PUBLIC | set(sys.stdlib_module_names), name
            assert not name.startswith("jaxshard."), f"{name}: write js.{name.split('.')[1]}"


REPOSITORY = "https://github.com/jaxshard/jaxshard"
WHEEL = "file:///wheels/jaxshard-0.1.0-py3-none-any.whl"


@EACH
def test_a_notebook_opens_in_colab(path: Path) -> None:
    title, badge = nbformat.read(path, as_version=4).cells[0].source.split("\n\n")[:2]
    assert title.startswith("# ")
    assert f"](https://colab.research.google.com/github/jaxshard/jaxshard/blob/main/notebooks/{path.name})" in badge


def test_all_notebooks_begin_with_the_same_cell():
    cells = {path.name: first_cell(path) for path in NOTEBOOKS}
    assert len(set(cells.values())) == 1, sorted(cells)
    assert all(cells_of(path)[0].source == cells[path.name] for path in NOTEBOOKS)


def run_first_cell(monkeypatch: pytest.MonkeyPatch, *, found: bool) -> list[tuple[str, str]]:
    """Run the first cell as IPython does, with magics that do nothing; returns those that it called."""
    called: list[tuple[str, str]] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if found else None)
    shell = SimpleNamespace(run_line_magic=lambda name, line: called.append((name, line)))
    code = TransformerManager().transform_cell(first_cell(NOTEBOOKS[0]))
    exec(code, {"get_ipython": lambda: shell})
    return called


@pytest.mark.parametrize("source", [None, WHEEL])
def test_the_first_cell_installs_from_where_the_variable_says(source: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("JAXSHARD", raising=False)
    if source is not None:
        monkeypatch.setenv("JAXSHARD", source)
    (pip, line), extension = run_first_cell(monkeypatch, found=False)
    assert pip == "pip" and extension == ("load_ext", "jaxshard.commands.notebook")
    # IPython replaces {names} of Python in a magic's line, and leaves the others to the shell.
    line = InteractiveShell.instance().var_expand(line)
    words = subprocess.run(["sh", "-c", f"printf '%s\n' {line}"], capture_output=True, text=True, check=True)
    where = source or f"git+{REPOSITORY}"
    assert words.stdout.splitlines() == ["install", "--quiet", f"jaxshard[viz,hf] @ {where}"]


def test_the_first_cell_installs_nothing_where_the_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_first_cell(monkeypatch, found=True) == [("load_ext", "jaxshard.commands.notebook")]
