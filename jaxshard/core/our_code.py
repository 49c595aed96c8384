"""Which source files belong to this package: asked for source lines of compiled programs and for errors."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def package_folder(name: str) -> Path:
    """Return the folder of an importable package, such as "jaxshard.engines".

    Folders are found by importable name, not by path, so that a package that moves fails here and not silently in
    whoever compares paths.

    Raises:
      ModuleNotFoundError: there is no such package.
    """
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {name!r}", name=name)
    # Not resolved: through a symbolic link, frames of our code bear the path by which Python imported it.
    return Path(spec.submodule_search_locations[0])


_JAXSHARD = package_folder("jaxshard")


def is_jaxshard_file(file: str | Path) -> bool:
    """Return True for a source file of this package."""
    return Path(file).is_relative_to(_JAXSHARD)
