"""A folder of checkpoints: a folder per step, named by its number, which exists once its manifest does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jaxshard.checkpoint.checksums import damage
from jaxshard.checkpoint.manifest import NAME


def root_of(dir: str | os.PathLike[str]) -> Path:
    """The folder of checkpoints as an absolute path.

    Raises:
      ValueError: an address such as gs://..., which would become a folder here of that name.
    """
    if "://" in os.fspath(dir):
        raise ValueError(
            f"{os.fspath(dir)}: checkpoints lie in a folder of a file system; mount the bucket and name that"
        )
    return Path(dir).absolute()


def numbered(root: Path) -> dict[int, Path]:
    """The folders of steps, complete or not, by their number and in its order."""
    if not root.is_dir():
        return {}
    found = {path for path in root.iterdir() if path.name.isdecimal() and path.name == str(int(path.name))}
    return {int(path.name): path for path in sorted(found, key=lambda path: int(path.name))}


def complete(root: Path) -> dict[int, Path]:
    """The steps that exist."""
    return {step: path for step, path in numbered(root).items() if (path / NAME).exists()}


def check_root(root: Path) -> None:
    """Raises for a file, and for the folder of one step; one that is absent or empty may become a folder of steps."""
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(f"{root}: that is a file, not a folder of checkpoints")
    if (root / NAME).exists():
        raise ValueError(f"{root} is the folder of one step; give {root.parent} and step={root.name}")


def latest_step(dir: str | os.PathLike[str], *, intact: bool = False) -> int | None:
    """The number of the newest step in a folder of checkpoints; None where there is none, or no folder yet.

    A step that was not completely saved does not exist. `intact` compares every byte with its checksum, which reads the
    step, and falls back to the newest step where they all fit.

    Raises:
      ValueError: it is the folder of one step.
      NotADirectoryError: it is a file.
    """
    check_root(root_of(dir))
    for step, path in reversed(complete(root_of(dir)).items()):
        if not intact or not damage(path):
            return step
    return None


def folder_of(root: Path, step: int | None) -> Path:
    """The folder of a step that exists, the newest one for None.

    Raises:
      FileNotFoundError: there is no such folder, or no such step in it.
      ValueError: the folder is not one of checkpoints, the step not complete.
    """
    check_root(root)
    if not root.exists():
        raise FileNotFoundError(f"{root}: there is no such folder of checkpoints")
    steps, folders = complete(root), numbered(root)
    if not folders:
        raise ValueError(f"{root} is not a folder of checkpoints: it holds no folder that is named by a step")
    there = f"complete steps: {', '.join(map(str, steps)) or 'none'}"
    if step is None and steps:
        return steps[max(steps)]
    if step in steps:
        return steps[step]
    if step is None or step in folders:
        path = folders[max(folders) if step is None else step]
        raise ValueError(f"{path / NAME} is missing, so this step was not completely saved; {there}")
    raise FileNotFoundError(f"{root}: there is no step {step}; {there}")


def remove(folder: Path) -> None:
    """Deletes a step; one that is half deleted does not exist."""
    if not (folder / NAME).is_dir():
        (folder / NAME).unlink(missing_ok=True)
    shutil.rmtree(folder)
