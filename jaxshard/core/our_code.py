"""Tell this package's source files from the user's, to name the user's source line in reports and errors."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def package_folder(name: str) -> Path:
    """Return the folder of an importable package, such as "jaxshard.engines".

    The folder is looked up by the name, so that renaming a package raises an error here. Comparisons with a folder that
    is written as a path would silently be False.

    Raises:
      ModuleNotFoundError: there is no such package.
    """
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no package {name!r}", name=name)
    # Symbolic links are not resolved: frames have the path by which Python imported the file.
    return Path(spec.submodule_search_locations[0])


_JAXSHARD = package_folder("jaxshard")
_STEPS = (package_folder("jaxshard.engines"), package_folder("jaxshard.training"))
_MODELS = package_folder("jaxshard.models")
_JAX = package_folder("jax")
_STDLIB = sysconfig.get_paths()["stdlib"]
_FRAMEWORKS = {
    "chex", "einops", "equinox", "flax", "haiku", "haliax", "jax", "jaxlib", "jaxtyping", "numpy", "optax",
    "optimistix", "qwix",
}  # fmt: skip
"""Installed packages that are no model code."""


@functools.cache
def is_jaxshard_file(file: str | Path) -> bool:
    """Return True for a source file of this package."""
    return Path(file).is_relative_to(_JAXSHARD)


def short_path(file: str) -> str:
    """Return the path of a source file from its installed package on, or else its folder and name."""
    path = file.replace("\\", "/")
    return path.split("site-packages/")[-1] if "site-packages/" in path else "/".join(path.split("/")[-2:])


def users_line(frames: Sequence[str]) -> str:
    """Return the source line to show for an operation: the innermost one of the user's code.

    If no line is the user's, return the innermost line outside of JAX.

    Installed frameworks and this package are not the user's code, but installed models and this package's models are.
    Code that only calls the step does not count: the search ends at a frame of an engine or of the training loop. From
    the stack

        flax/linen/linear.py:271   user/model.py:22   jaxshard/engines/explicit.py:80   user/train.py:10

    it returns user/model.py:22. If this frame were missing, it would return flax/linen/linear.py:271 and not
    user/train.py:10, which only calls the step.

    Args:
      frames: the stack of the operation as "file:line", innermost frame first.
    """
    return users_frame(frames) or next((one for one in frames if not Path(one).is_relative_to(_JAX)), frames[0])


def users_frame(frames: Sequence[str]) -> str:
    """Return the innermost frame of the user's code, as `users_line` finds it; "" if there is none."""
    for frame in frames:
        file = frame.rpartition(":")[0]
        if _is_step(file):
            break
        if not _is_library(file):
            return frame
    return ""


def is_outside_engines(line: str) -> bool:
    """Return True if a source line is outside of this package, or in one of its ready-made models.

    Args:
      line: "file:number", or "near file:number".
    """
    file = Path(line.removeprefix("near ").rpartition(":")[0])
    return file.is_relative_to(_MODELS) or not is_jaxshard_file(file)


@functools.cache
def _is_step(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in _STEPS)


@functools.cache
def _is_library(name: str) -> bool:
    file = Path(name)
    if is_jaxshard_file(file):
        return not file.is_relative_to(_MODELS)
    for folder in ("site-packages", "dist-packages"):
        if folder in file.parts:
            return file.parts[file.parts.index(folder) + 1] in _FRAMEWORKS
    return file.is_relative_to(_STDLIB) or "<" in str(file)
