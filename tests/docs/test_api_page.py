"""docs/reference/api.md lists what the package exports, with signatures and the first sentence of every docstring.

`JAXSHARD_WRITE_DOCS=1 pytest tests/docs/test_api_page.py` writes the page anew.
"""

import ast
import inspect
import itertools
import os
import types
from collections.abc import Iterator
from pathlib import Path

import jaxshard as js
from tests.docs.pages import ROOT

API = ROOT / "docs" / "reference" / "api.md"
NAMESPACES = (js.data, js.distributed, js.metrics, js.models, js.optim, js.plan, js.schedules)
ROOMS = {
    "core": "Meshes, strategies, layouts and losses",
    "adapt": "Models",
    "layers": "Layers",
    "engines": "Engines",
    "training": "Training",
    "data": "Data",
    "generation": "Generation",
    "checkpoint": "Checkpoints",
    "checks": "Checks",
}


def test_the_page_lists_every_public_name():
    written = api_page()
    if os.environ.get("JAXSHARD_WRITE_DOCS"):
        API.write_text(written)
    assert API.read_text() == written, "docs/reference/api.md is out of date; write it with JAXSHARD_WRITE_DOCS=1"


def api_page() -> str:
    lines = [
        "# Public names",
        "",
        "Written from the docstrings by `tests/docs/test_api_page.py`. The rest of a docstring (arguments, shapes,",
        "collectives, errors) is shown by `help(js.fsdp)`.",
        "",
        "## js",
    ]
    for room, title in ROOMS.items():
        names = sorted(name for name, module in js._MODULE_OF.items() if module.startswith(f"jaxshard.{room}."))
        lines += ["", f"### {title}", "", *entries("js", js, names)]
    for module in NAMESPACES:
        names = [name for name in sorted(vars(module)) if is_shown(module, name)]
        prefix = f"js.{module.__name__.rpartition('.')[2]}"
        lines += ["", f"## {prefix}", "", first_line(module), "", *entries(prefix, module, names)]
    return "\n".join(lines) + "\n"


def test_every_name_of_js_is_in_a_section():
    assert {module.split(".")[1] for module in js._MODULE_OF.values()} == set(ROOMS)


def is_shown(module: types.ModuleType, name: str) -> bool:
    """Whether a name of a namespace is public: re-exported by a folder, or made in a module of its own."""
    value = getattr(module, name)
    if name.startswith("_") or inspect.ismodule(value):
        return False
    return hasattr(module, "__path__") or getattr(value, "__module__", None) == module.__name__


def entries(prefix: str, module: types.ModuleType, names: list[str]) -> Iterator[str]:
    for name in names:
        value = getattr(module, name)
        yield f"- **`{prefix}.{name}`**" + (f"`{text}`" if (text := signature_of(value)) else "")
        if text := first_line(value) if is_code(value) else attribute_docstring(module, name):
            yield f"  <br>{text}"


def is_code(value: object) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def first_line(value: object) -> str:
    return (inspect.getdoc(value) or "").split("\n")[0]


def attribute_docstring(module: types.ModuleType, name: str) -> str:
    """The first line of the text under an assignment such as `RULES = ...`, in the file that makes it."""
    home = js._MODULE_OF.get(name) if module is js else import_of(module, name)
    if home is None:
        return ""
    body = ast.parse(Path(str(js_file(home))).read_text()).body
    for statement, following in itertools.pairwise(body):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return inspect.cleandoc(str(following.value.value)).split("\n")[0]
    return ""


def import_of(module: types.ModuleType, name: str) -> str | None:
    """The module from which a namespace imports a name."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return node.module
    return None


def js_file(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def signature_of(value: object) -> str:
    """A signature as it is written in the source: `(axis: AxisName = 'data', *, min_size: int = 16384) -> Strategy`."""
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    if is_error or not is_code(value) or getattr(value, "_is_protocol", False):
        return ""
    assert callable(value)
    signature = inspect.signature(value)
    words: list[str] = []
    previous = None
    for parameter in signature.parameters.values():
        kind = parameter.kind
        if previous is parameter.POSITIONAL_ONLY and kind is not previous:
            words.append("/")
        if kind is parameter.KEYWORD_ONLY and previous not in (kind, parameter.VAR_POSITIONAL):
            words.append("*")
        words.append(parameter_text(parameter))
        previous = kind
    returns = "" if inspect.isclass(value) else f" -> {annotation_text(signature.return_annotation)}"
    return f"({', '.join(words)}){returns}"


def parameter_text(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}: {annotation_text(parameter.annotation)}"
    default = parameter.default
    if default is parameter.empty:
        return text
    hidden = callable(default) or "<" in repr(default) or len(repr(default)) > 60
    return f"{text} = {'...' if hidden else repr(default)}"


def annotation_text(annotation: object) -> str:
    """An annotation as written in the source, whatever this Python makes of it."""
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__forward_arg__", None) or getattr(annotation, "__name__", str(annotation))
