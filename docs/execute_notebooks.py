"""Execute notebooks and store what they print and draw: `python docs/execute_notebooks.py [FILE ...] [--into FOLDER]`.

Without files all of `notebooks/` are executed, each in a fresh kernel of this interpreter with this checkout of the
package. A cell that raises or warns is an error, and then nothing is written. What would differ from one execution to
the next without meaning anything (times, addresses, the Python version) is left out, and so are ended progress lines.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 600
"""The longest that a cell may take; a machine with idle cores needs seconds."""

_WORDS = 200
"""The most letters of a value's text that are kept beside its picture or page."""


def execute(path: Path) -> nbformat.NotebookNode:
    """Return the notebook in a file with the outputs of an execution from top to bottom.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
      ValueError: a cell wrote to the standard error, as warnings do.
    """
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", record_timing=False, coalesce_streams=True, resources=where
    )
    client.execute(env=_environment())
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("data") != {"text/plain": ""}]
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise ValueError(f"{path.name}: a cell warns:\n{cell.source}\n\n{output.text}")
            _tidy(output)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def _environment() -> dict[str, str]:
    """That of this process, with this checkout first and without devices that it simulates itself."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": os.pathsep.join(paths)}


def _tidy(output: nbformat.NotebookNode) -> None:
    """Leave out addresses, folders of this machine, and of values that draw themselves the long text beside it."""
    if "text" in output:
        output.text = _without_machine(output.text)
    data = output.get("data", {})
    for kind in data:
        if kind.startswith("text/"):
            data[kind] = _without_machine(data[kind])
    if len(data) > 1 and len(data.get("text/plain", "")) > _WORDS:
        data["text/plain"] = f"{data['text/plain'].split('(')[0][:_WORDS]}(...)"


def _without_machine(text: str) -> str:
    """Text without addresses and folders; a line of a cell is one of `cell.py`."""
    text = re.sub(r"[^\s(]*/ipykernel_\d+/\d+\.py", "cell.py", text.replace(f"{ROOT}{os.sep}", ""))
    return re.sub(r"\b0x[0-9a-f]{6,}\b", "0x0", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="notebooks; by default all of notebooks/")
    parser.add_argument("--into", type=Path, help="a folder for the executed notebooks, in place of their own")
    arguments = parser.parse_args()
    for path in arguments.files or sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = execute(path.resolve())
        nbformat.write(notebook, (arguments.into or path.parent) / path.name)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells", file=sys.stderr)


if __name__ == "__main__":
    main()
