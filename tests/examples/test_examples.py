"""Every example is short, well typed, and trains: the loss that it prints falls."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MAX_LINES = {"images": 110}
"""The longest that an example may be: 60 lines, but for one that has its data and its model in it."""


def load(name: str) -> ModuleType:
    """Imports an example as a module, so that it runs in this process, on its devices."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(printed: str) -> list[float]:
    """The losses of the lines "step 10: loss 0.963, ..." and "10 0.963"."""
    return [float(number) for number in re.findall(r"^(?:step )?\d+(?:: loss)? (\d+\.\d+)", printed, re.MULTILINE)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_is_short(path: Path):
    assert len(path.read_text().splitlines()) <= MAX_LINES.get(path.stem, 60)


@pytest.mark.slow
def test_images_of_a_folder_train_over_a_mesh_of_data_and_tensor_axes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    pytest.importorskip("grain")
    image = pytest.importorskip("PIL.Image")
    for colour in ("red", "green", "blue"):
        (tmp_path / colour).mkdir()
        for number in range(12):
            image.new("RGB", (40, 30 + number), colour).save(tmp_path / colour / f"{number}.png")
    load("images").main(steps=11, mesh="data=4,tensor=2", folder=str(tmp_path), batch=8)
    first, last = losses(capsys.readouterr().out)
    assert last < first < 1


@pytest.mark.slow
def test_nnx_goes_on_where_it_was_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    load("nnx").main(steps=10, folder=str(tmp_path))
    before = losses(capsys.readouterr().out)
    load("nnx").main(steps=12, folder=str(tmp_path))
    after = losses(capsys.readouterr().out)
    assert len(before) == 10 and len(after) == 2
    assert after[-1] < before[0] - 1


def test_plain_trains(capsys: pytest.CaptureFixture[str]):
    load("plain").main(steps=50)
    printed = capsys.readouterr().out
    first, *_, last = losses(printed)
    assert last < first / 1.5
    assert "grad" in printed and "predictions:" in printed


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_as_a_script(path: Path, tmp_path: Path):
    if path.stem == "images":
        pytest.importorskip("grain")
    command = [sys.executable, str(path), "--steps", "20"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    first, *_, last = losses(result.stdout)
    assert last < first


# What a user's own type checker says, with its default settings.
CHECKERS = {
    "mypy": ["mypy", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent"],
    "pyright": ["pyright"],
}


def check_types(checker: str, path: Path) -> subprocess.CompletedProcess[str]:
    # pyright brings Node, 200 MB, so it has an extra of its own. CI installs it, and never skips.
    if importlib.util.find_spec(checker) is None and "CI" not in os.environ:
        pytest.skip(f'{checker} is not installed: pip install -e ".[types]"')
    command = [sys.executable, "-m", *CHECKERS[checker], str(path)]
    return subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_know_every_name_that_the_examples_use(checker: str):
    result = check_types(checker, ROOT / "examples")
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checkers_find_the_lazy_names(checker: str, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text("import jaxshard as js\n\nreveal_type(js.fsdp)\nreveal_type(js.data.stdlib)\njs.no_such_name\n")
    result = check_types(checker, program)
    assert result.returncode == 1
    revealed = [line for line in result.stdout.splitlines() if "Revealed type" in line or "Type of" in line]
    assert len(revealed) == 2
    assert "Placement" in revealed[0] or "Strategy" in revealed[0]
    assert "Corpus" in revealed[1]
    assert "no_such_name" in result.stdout
