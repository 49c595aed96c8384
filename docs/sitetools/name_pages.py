"""A page for each public name: signature, docstring, methods and an example."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from sitetools.docstring import TITLES, example_of, fenced, markdown, sections_of
from sitetools.public_names import Name, methods_of, public_names, signature_of

FOLDER = "reference/names"


def name_pages(problems: list[str]) -> Iterator[tuple[str, str]]:
    """Make the pages, each with its path; names without docstring or example are added to the problems."""
    for name in public_names():
        if not name.docstring:
            problems.append(f"{name.full} has no docstring")
        if example(name) is None:
            problems.append(f"{name.full} has no example, and neither has what makes it")
        yield page_path(name), page_of(name)


def page_path(name: Name) -> str:
    """The path of a name's page; js.Layout and js.layout differ on disks that do not tell cases apart, too."""
    same = [other for other in public_names() if other.full.lower() == name.full.lower()]
    is_second = len(same) > 1 and inspect.isclass(name.value)
    return f"{FOLDER}/{name.full}{'_class' if is_second else ''}.md"


def page_of(name: Name) -> str:
    """The page of a name."""
    where = f"`from jaxshard{name.namespace[2:]} import {name.name}`"
    parts = [
        "---\norphan: true\n---",
        f"# {name.full}",
        _object(_kind(name.value), name.full, signature_of(name.value)),
    ]
    found = example(name)
    for section in sections_of(name.docstring):
        if section.name == "Example":
            continue
        if section.name:
            parts.append(f"## {TITLES[section.name]}")
        parts.append(markdown(section))
    if found:
        maker, code = found
        parts.append("## Example")
        if maker != name:
            parts.append(f"That of `{maker.full}`, which makes it:")
        parts.append(fenced(code))
    parts += _methods(name)
    parts.append(f"---\n\n{where}, defined in `{name.home}`. [All public names](../api.md)")
    return "\n\n".join(parts) + "\n"


def example(name: Name) -> tuple[Name, str] | None:
    """A name's example; of a class without one that of a function which returns it, or of a method of its own."""
    code = example_of(name.docstring)
    if code:
        return name, code
    for maker in makers(name):
        if code := example_of(maker.docstring):
            return maker, code
    return None


def makers(name: Name) -> Iterator[Name]:
    """The public functions that say in their signature that they return a class or alias."""
    if inspect.isfunction(name.value):
        return
    for other in public_names():
        returned = signature_of(other.value).rpartition(" -> ")[2] if inspect.isfunction(other.value) else ""
        if re.search(rf"\b{name.name}\b", returned):
            yield other


def _methods(name: Name) -> list[str]:
    methods = [(method, value, inspect.getdoc(value) or "") for method, value in methods_of(name.value)]
    documented = [(method, value, text) for method, value, text in methods if text]
    parts = ["## Methods"] if documented else []
    for method, value, docstring in documented:
        kind = "method" if inspect.isfunction(value) else "property"
        signature = re.sub(r"^\(self[^,)]*(?:, )?", "(", signature_of(value))
        parts += [f"### {method}", _object(kind, f"{name.full}.{method}", signature)]
        for section in sections_of(docstring):
            if section.name:
                parts.append(f"**{TITLES[section.name]}**")
            parts.append(markdown(section))
    return parts


def _kind(value: Any) -> str:
    if inspect.isclass(value):
        return "exception" if issubclass(value, Exception) else "class"
    return "function" if inspect.isfunction(value) else "data"


def _object(kind: str, full: str, signature: str) -> str:
    return f"```{{py:{kind}}} {full}{signature}\n```"
