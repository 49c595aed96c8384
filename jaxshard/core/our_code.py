"""Which source files belong to this package, and which are the user's: for source lines of programs and for errors."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
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
_STEPS = (package_folder("jaxshard.engines"), package_folder("jaxshard.training"))
_MODELS = package_folder("jaxshard.models")
_STDLIB = sysconfig.get_paths()["stdlib"]
_FRAMEWORKS = {
    "chex", "einops", "equinox", "flax", "haiku", "haliax", "jax", "jaxlib", "jaxtyping", "numpy", "optax",
    "optimistix", "qwix",
}  # fmt: skip
"""Installed packages that are nobody's model."""


def is_jaxshard_file(file: str | Path) -> bool:
    """Return True for a source file of this package."""
    return Path(file).is_relative_to(_JAXSHARD)


def users_line(frames: Sequence[str]) -> str:
    """Choose the frame to show: the innermost one of the user's code, else the innermost of all.

    Installed frameworks and this package are not the user's code (its ready-made models are, and so are models that are
    installed), nor is what merely calls the step: the search ends at a frame of an engine or of the training loop. So
    of the stack

        flax/linen/linear.py:271   user/model.py:22   jaxshard/engines/explicit.py:80   user/train.py:10

    the line shown is user/model.py:22; without that frame the operation is the engine's own, not user/train.py's.
    """
    return users_frame(frames) or frames[0]


def users_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame of the user's code, as `users_line` finds it; "" where there is none."""
    for frame in frames:
        file = Path(frame.rpartition(":")[0])
        if any(file.is_relative_to(folder) for folder in _STEPS):
            break
        if not _is_library(file):
            return frame
    return ""


def is_outside_engines(line: str) -> bool:
    """Return True for a line, maybe "near" it, of a model: the user's own, or a ready-made one, or of a library."""
    file = Path(line.removeprefix("near ").rpartition(":")[0])
    return file.is_relative_to(_MODELS) or not is_jaxshard_file(file)


def _is_library(file: Path) -> bool:
    if is_jaxshard_file(file):
        return not file.is_relative_to(_MODELS)
    for folder in ("site-packages", "dist-packages"):
        if folder in file.parts:
            return file.parts[file.parts.index(folder) + 1] in _FRAMEWORKS
    return file.is_relative_to(_STDLIB) or "<" in str(file)
