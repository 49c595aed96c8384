"""Every public name of the package, where it lives, and the docstring it has."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jaxshard as js


class Name(NamedTuple):
    """A public name.

    Attributes:
      namespace: "js", or such as "js.plan".
      name: the last word, such as "fsdp".
      value: the function, class or constant.
      home: the module that makes it.
    """

    namespace: str
    name: str
    value: Any
    home: str

    @property
    def full(self) -> str:
        return f"{self.namespace}.{self.name}"

    @property
    def is_code(self) -> bool:
        """Whether it is a function or a class, which has a docstring of its own."""
        return inspect.isclass(self.value) or inspect.isfunction(self.value)

    @property
    def docstring(self) -> str:
        """The docstring; of a constant the text under its assignment, such as `RULES = ...`."""
        return inspect.getdoc(self.value) or "" if self.is_code else attribute_docstring(self.home, self.name)


def namespaces() -> list[types.ModuleType]:
    """The modules with public names, other than `js` itself."""
    return [getattr(js, name) for name in sorted(js._SUBMODULES)]


@functools.cache
def public_names() -> tuple[Name, ...]:
    """All public names: those of `js`, then those of each namespace, by the alphabet."""
    own = [Name("js", name, getattr(js, name), home) for name, home in sorted(js._MODULE_OF.items())]
    return (*own, *(name for module in namespaces() for name in names_of(module)))


def names_of(module: types.ModuleType) -> list[Name]:
    """The public names of a namespace."""
    prefix = f"js.{module.__name__.rpartition('.')[2]}"
    return [
        Name(prefix, name, value, import_of(module, name) or module.__name__)
        for name, value in sorted(vars(module).items())
        if is_public(module, name)
    ]


def is_public(module: types.ModuleType, name: str) -> bool:
    """Return True if a name of a namespace is public: re-exported by a folder, or made in a module of its own."""
    value = getattr(module, name)
    if name.startswith("_") or inspect.ismodule(value):
        return False
    return hasattr(module, "__path__") or getattr(value, "__module__", None) == module.__name__


def import_of(module: types.ModuleType, name: str) -> str | None:
    """The module from which a namespace imports a name."""
    for node in ast.walk(_parsed(module.__name__)):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return node.module
    return None


def attribute_docstring(module: str, name: str) -> str:
    """The text under an assignment, in the file that makes it."""
    for statement, following in itertools.pairwise(_parsed(module).body):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return inspect.cleandoc(str(following.value.value))
    imported = import_of(importlib.import_module(module), name)
    return attribute_docstring(imported, name) if imported else ""


@functools.cache
def _parsed(module: str) -> ast.Module:
    return ast.parse(Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8"))


def signature_of(value: Any) -> str:
    """A signature as it is written in the source: `(axis: AxisName = 'data', *, min_size: int = 16384) -> Strategy`."""
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    is_code = inspect.isclass(value) or inspect.isfunction(value)
    if is_error or not is_code or getattr(value, "_is_protocol", False):
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
        words.append(_parameter_text(parameter))
        previous = kind
    returns = "" if inspect.isclass(value) else f" -> {_annotation_text(signature.return_annotation)}"
    return f"({', '.join(words)}){returns}"


def _parameter_text(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = f"{stars.get(parameter.kind, '')}{parameter.name}: {_annotation_text(parameter.annotation)}"
    default = parameter.default
    if default is parameter.empty:
        return text
    hidden = callable(default) or "<" in repr(default) or len(repr(default)) > 60
    return f"{text} = {'...' if hidden else repr(default)}"


def _annotation_text(annotation: object) -> str:
    """An annotation as written in the source, whatever this Python makes of it."""
    if isinstance(annotation, str):
        return annotation
    return str(getattr(annotation, "__forward_arg__", None) or getattr(annotation, "__name__", annotation))


def methods_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class itself defines and says something about."""
    if not inspect.isclass(value):
        return
    for name, member in vars(value).items():
        plain = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not name.startswith("_") and (
            inspect.isfunction(plain) or isinstance(plain, (property, functools.cached_property))
        ):
            yield name, plain
