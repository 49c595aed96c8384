"""The documentation is true: the quick start runs, and docs/api.md lists what the package exports.

`JAXSHARD_WRITE_DOCS=1 pytest tests/test_docs.py` writes docs/api.md anew.
"""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxshard as js

PUBLIC = (js, js.data, js.distributed, js.models, js.optim, js.plan, js.schedules)
ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api.md"


@pytest.mark.parametrize(
    ("heading", "number", "lines", "shown"),
    [
        ("Quick start", 0, 15, "over data"),
        ("Your own Flax model", 0, 19, "features: kernel"),
        ("Your own Flax model", 1, 19, "dim 1 over tensor"),
        ("Pipelines", 0, 21, "pipe=1: blocks 2-3, 6-7"),
    ],
)
def test_the_quick_starts_are_short_and_run(heading, number, lines, shown):
    code = quick_starts(heading)[number]
    assert len(code.strip().splitlines()) <= lines
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert shown in result.stdout
    assert np.isfinite(float(result.stdout.split()[-1]))


def test_the_newcomer_blocks_are_there():
    text = (ROOT / "README.md").read_text()
    for part in ("run", "test"):
        assert re.search(rf"<!-- newcomer: {part} -->\n+```\w*\n(.+?)```", text, re.DOTALL), part


def test_relative_links_of_the_readme_and_the_docs_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)", page.read_text())]
    relative = [(page, link) for page, link in links if "://" not in link]
    assert relative
    assert not [f"{page.name}: {link}" for page, link in relative if not (page.parent / link).exists()]


def test_api_page_lists_every_public_name():
    written = api_page()
    if os.environ.get("JAXSHARD_WRITE_DOCS"):
        API.write_text(written)
    assert API.read_text() == written, "docs/api.md is out of date; write it with JAXSHARD_WRITE_DOCS=1"


def quick_starts(heading: str) -> list[str]:
    """The fenced Python blocks of the README under a heading."""
    section = (ROOT / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def api_page() -> str:
    """Every public name with its signature and the first line of its docstring."""
    lines = ["# Public names", "", "Written from the package by `tests/test_docs.py`; later versions add to this list."]
    for module in PUBLIC:
        prefix = module.__name__.replace("jaxshard", "js")
        lines += ["", f"## {prefix}", ""]
        for name in sorted(dir(module)):
            value = getattr(module, name)
            if not name.startswith("_") and not inspect.ismodule(value):
                lines += _entry(f"{prefix}.{name}", value)
    lines += ["", "## js.metrics", ""]
    for name, value in sorted(vars(js.metrics).items()):
        if not name.startswith("_") and getattr(value, "__module__", None) == js.metrics.__name__:
            lines += _entry(f"js.metrics.{name}", value)
    return "\n".join(lines) + "\n"


def _entry(name: str, value: object) -> list[str]:
    signature = _signature(value)
    first = (inspect.getdoc(value) or "").split("\n")[0]
    documented = first and not first.startswith(name.split(".")[-1] + "(")
    return [f"- `{name}{signature}`" + (f": {first}" if documented else "")]


def _signature(value: object) -> str:
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    if is_error or not (inspect.isclass(value) or inspect.isfunction(value)) or getattr(value, "_is_protocol", False):
        return ""
    signature = inspect.signature(value)
    words: list[str] = []
    previous = None
    for parameter in signature.parameters.values():
        kind = parameter.kind
        if previous is parameter.POSITIONAL_ONLY and kind is not previous:
            words.append("/")
        if kind is parameter.KEYWORD_ONLY and previous not in (kind, parameter.VAR_POSITIONAL):
            words.append("*")
        if not (issubclass(type(value), type) and parameter.name in ("parent", "name") and hasattr(value, "clone")):
            words.append(_parameter(parameter))  # every Flax module has a parent and a name
        previous = kind
    result = "" if inspect.isclass(value) else f" -> {_annotation(signature.return_annotation)}"
    return f"({', '.join(words)}){result}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}: {_annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return text
    default = parameter.default
    shown = "..." if callable(default) or "<" in repr(default) or len(repr(default)) > 60 else repr(default)
    return f"{text} = {shown}"


def _annotation(annotation: object) -> str:
    """As written in the source, whatever this Python makes of it."""
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__forward_arg__", None) or getattr(annotation, "__name__", str(annotation))
