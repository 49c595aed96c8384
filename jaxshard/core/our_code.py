"""Which files are this package's own: for source lines of programs, hang reports and errors."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def room(name: str) -> Path:
    """The folder of a package such as "jaxshard.engines".

    Raises:
      ModuleNotFoundError: there is no such package; a room that moved is noticed when its name is read.
    """
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {name!r}", name=name)
    return Path(spec.submodule_search_locations[0]).resolve()


PACKAGE = room("jaxshard")


def is_ours(file: str | Path) -> bool:
    """Whether a file belongs to this package."""
    return Path(file).is_relative_to(PACKAGE)
