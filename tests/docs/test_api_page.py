"""docs/reference/api.md lists what the package exports, with signatures and the first sentence of every docstring.

`JAXSHARD_WRITE_DOCS=1 pytest tests/docs/test_api_page.py` writes the page anew.
"""

import os
from collections.abc import Iterable, Iterator

from sitetools.public_names import Name, namespaces, public_names, signature_of

import jaxshard as js
from tests.docs.pages import ROOT

API = ROOT / "docs" / "reference" / "api.md"
ROOMS = {
    "core": "Meshes, strategies, layouts and losses",
    "adapt": "Models",
    "layers": "Layers",
    "engines": "Engines",
    "training": "Training",
    "data": "Data",
    "reshard": "Transfers",
    "generation": "Generation",
    "checkpoint": "Checkpoints",
    "checks": "Checks",
    "profile": "Profiles",
}
LISTED_WITH = {"optim": "core", "hlo": "checks", "plan": "checks"}
"""Rooms with few names of `js`, each with the room whose section has them: js.layout, js.collectives, js.guard."""


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
        "collectives, errors, an example) is shown by `help(js.fsdp)`, and in the site by the page of a name.",
        "",
        "```python",
        "import jaxshard as js",
        "",
        'print([name for name in dir(js) if name.startswith("zero")])',
        "```",
        "",
        "```text",
        "['zero1', 'zero2']",
        "```",
        "",
        "## js",
    ]
    for room, title in ROOMS.items():
        names = [name for name in public_names() if name.namespace == "js" and room_of(name) == room]
        lines += ["", f"### {title}", "", *entries(names)]
    for module in namespaces():
        prefix = f"js.{module.__name__.rpartition('.')[2]}"
        names = [name for name in public_names() if name.namespace == prefix]
        lines += ["", f"## {prefix}", "", first_line(module.__doc__ or ""), "", *entries(names)]
    return "\n".join(lines) + "\n"


def test_every_name_of_js_is_in_a_section():
    assert {room_of(name) for name in public_names() if name.namespace == "js"} == set(ROOMS)
    assert {name.name for name in public_names() if name.namespace == "js"} == set(js._MODULE_OF)


def room_of(name: Name) -> str:
    room = name.home.split(".")[1]
    return LISTED_WITH.get(room, room)


def entries(names: Iterable[Name]) -> Iterator[str]:
    for name in names:
        yield f"- **`{name.full}`**" + (f"`{text}`" if (text := signature_of(name.value)) else "")
        if text := first_line(name.docstring):
            yield f"  <br>{text}"


def first_line(docstring: str) -> str:
    return docstring.split("\n")[0]
