"""A folder of checkpoints, with one folder per step; find its complete steps.

run/1000/    complete: the folder has a manifest
run/2000/    incomplete, because the save was interrupted: ignored, and replaced by the next save of the step
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from jaxshard.checkpoint.checksums import find_damage
from jaxshard.checkpoint.manifest import MANIFEST
from jaxshard.storage.paths import AnyPath, ObjectPath, as_path


def absolute_root(dir: str | os.PathLike[str]) -> AnyPath:
    """Return the folder of checkpoints: an absolute path, or a path in an object store.

    Raises:
      ValueError: `dir` is an address of a kind that is not known, such as hdfs://...
    """
    return as_path(dir).absolute()


def step_folders(root: AnyPath) -> dict[int, AnyPath]:
    """Return {step: folder} of all steps, complete or not, in ascending order; {} if `root` is not a folder."""
    if isinstance(root, Path) and not root.is_dir():
        return {}
    names = (path.name for path in root.iterdir())
    steps = sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))
    return {step: root / str(step) for step in steps}


def complete_steps(root: AnyPath) -> dict[int, AnyPath]:
    """Return {step: folder} of the steps in `root` that have a manifest, in ascending order."""
    return {step: path for step, path in step_folders(root).items() if has_manifest(path)}


def has_manifest(folder: AnyPath) -> bool:
    """Return True if the folder of a step has a manifest."""
    file = folder / MANIFEST
    return file.is_file() if isinstance(file, ObjectPath) else file.exists()


def check_root(root: AnyPath) -> None:
    """Raise if `root` is a file, or the folder of a single step; do nothing if `root` does not exist."""
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(f"{root}: that is a file, not a folder of checkpoints")
    if (root / MANIFEST).is_file():
        raise ValueError(f"{root} is the folder of one step; give {root.parent} and step={root.name}")


def latest_step(dir: str | os.PathLike[str], *, intact: bool = False) -> int | None:
    """Return the number of the newest complete step in a folder of checkpoints.

    Args:
      dir: the folder that `js.save` or `js.Checkpointer` writes into; also s3://bucket/run or gs://bucket/run.
      intact: also compare every byte of the step with its checksum, and return the newest step without damage. Reads
        all files of the step.

    Returns:
      The number of the step; None if there is no such step, or no folder yet.

    Raises:
      ValueError: `dir` is the folder of a single step.
      NotADirectoryError: `dir` is a file.

    Example:
        if js.latest_step("run") is None:
            run = js.init(init_fn, tx, layout, 0)
        else:
            run = js.restore("run", layout)
    """
    root = absolute_root(dir)
    check_root(root)
    newest_first = reversed(complete_steps(root).items())
    return next((step for step, path in newest_first if not intact or not find_damage(path)), None)


def step_folder(root: AnyPath, step: int | None) -> AnyPath:
    """Return the folder of a complete step; if `step` is None, of the newest complete step.

    Raises:
      FileNotFoundError: `root` does not exist, or has no such step.
      ValueError: `root` is not a folder of checkpoints, or the step is not complete.
    """
    check_root(root)
    if not root.exists():
        raise FileNotFoundError(f"{root}: there is no such folder of checkpoints")
    steps, folders = complete_steps(root), step_folders(root)
    if not folders:
        raise ValueError(f"{root} is not a folder of checkpoints: it holds no folder that is named by a step")
    step = max(steps or folders) if step is None else step
    if step in steps:
        return steps[step]
    there = f"complete steps: {', '.join(map(str, steps)) or 'none'}"
    if step in folders:
        raise ValueError(f"{folders[step] / MANIFEST} is missing, so this step was not completely saved; {there}")
    raise FileNotFoundError(f"{root}: there is no step {step}; {there}")


def delete_step(folder: Path) -> None:
    """Delete the folder of a step, its manifest first, so that an interrupted deletion leaves no complete step.

    Raises:
      OSError: the folder is a symbolic link, whose target must not be deleted.
    """
    if folder.is_symlink():
        raise OSError(f"{folder} is a symbolic link to {folder.readlink()}, where nothing is deleted; remove the link")
    if not (folder / MANIFEST).is_dir():
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)
