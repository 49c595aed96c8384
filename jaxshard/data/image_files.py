"""Read folders of image files, by Pillow and in parallel by Grain (the extra `images`)."""

from __future__ import annotations

import hashlib
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxshard.data.corpus import HELD_OUT

_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_HELD_OUT_NAMES = ("val", "test")
_THREADS = 16


@dataclass(frozen=True)
class ImageFolder:
    """A data set of image files.

    Attributes:
      root: the folder.
      files: the paths of the files below it.
      labels: the label of each file.
    """

    root: Path
    files: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {"image": read_image(self.root / self.files[index]), "label": self.labels[index]}

    def facts(self) -> list[str]:
        """Describe every file by its path and size."""
        return [f"{name} {(self.root / name).stat().st_size}" for name in self.files]


def open_folder(root: Path) -> tuple[ImageFolder, ImageFolder, tuple[str, ...]]:
    """List the files of a folder as (files to train on, held-out files, names of classes).

    Raises:
      ValueError: Grain or Pillow is missing; no classes, a class without images, or held-out classes without training
        images.
    """
    need("PIL.Image", "grain")
    held_name = next((name for name in _HELD_OUT_NAMES if (root / name).is_dir()), None)
    if held_name is not None and (root / "train").is_dir():
        train, held = _list_classes(root, "train"), _list_classes(root, held_name)
        if other := sorted(set(held) - set(train)):
            raise ValueError(f"data: {root / held_name} has classes that {root / 'train'} lacks: {', '.join(other)}")
    else:
        found = _list_classes(root, ".")
        share = {name: _share(name) for files in found.values() for name in files}
        if not any(value < HELD_OUT for value in share.values()):
            share[min(share, key=share.__getitem__)] = 0.0
        train, held = (
            {one: [name for name in files if (share[name] < HELD_OUT) == wanted] for one, files in found.items()}
            for wanted in (False, True)
        )
    names = tuple(sorted(train))
    if empty := [name for name in names if not train[name]]:
        raise ValueError(f"data: {root} has too few images to train on of these classes: {', '.join(empty)}")
    return _make(root, train, names), _make(root, held, names), names


def _make(root: Path, files: dict[str, list[str]], names: tuple[str, ...]) -> ImageFolder:
    pairs = [(name, label) for label, one in enumerate(names) for name in files.get(one, ())]
    return ImageFolder(root, tuple(name for name, _ in pairs), tuple(label for _, label in pairs))


def _list_classes(root: Path, part: str) -> dict[str, list[str]]:
    """List the images of every class of a part of a folder, as paths below `root`, in order."""
    found: dict[str, list[str]] = {}
    left_out = []
    for folder in sorted(path for path in (root / part).iterdir() if path.is_dir() and path.name[0] != "."):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
        found[folder.name] = [path.relative_to(root).as_posix() for path in files if path.suffix.lower() in _SUFFIXES]
        left_out += [path for path in files if path.suffix.lower() not in _SUFFIXES]
    if empty := [name for name, files in found.items() if not files]:
        raise ValueError(f"data: {root / part} has folders without images: {', '.join(empty)}; take them away")
    if not found:
        raise ValueError(f"data: {root / part} has no folders: put the images of each class into a folder of its own")
    if left_out:
        warnings.warn(f"data: left out {len(left_out)} files that are no images, such as {left_out[0]}", stacklevel=5)
    return found


def _share(path: str) -> float:
    """Return a hash of a path in [0, 1), which does not depend on other files."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest()) / 2**64


def read_image(path: Path) -> np.ndarray:
    """Read a file as an RGB image, uint8[H, W, 3].

    Raises:
      ValueError: it is not an image, truncated, or too large.
    """
    (pillow,) = need("PIL.Image")
    try:
        with pillow.open(path) as image:
            pixels: np.ndarray = np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise ValueError(f"data: {path} can't be read as an image: {' '.join(str(error).split())}") from error
    return pixels


def resize(image: np.ndarray, side: int, box: tuple[float, float, float, float] | None = None) -> np.ndarray:
    """Resize an image uint8[H, W, C] to [side, side, C].

    Args:
      image: the image.
      side: height and width.
      box: the part (left, top, right, bottom) to use. By default the centred square of seven eighths of the shorter
        side.
    """
    (pillow,) = need("PIL.Image")
    height, width = image.shape[:2]
    if box is None:
        half = min(height, width) * 7 / 16
        box = (width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half)
    channels = [
        pillow.fromarray(np.ascontiguousarray(one)).resize((side, side), pillow.Resampling.BILINEAR, box=box)
        for one in np.moveaxis(image, -1, 0)
    ]
    return np.stack([np.asarray(one) for one in channels], axis=-1)


def read_in_parallel(read: Callable[[int], Any], numbers: list[int]) -> list[Any]:
    """Return [read(number), ...], computed in parallel in threads of Grain."""
    (grain,) = need("grain")
    dataset = grain.MapDataset.source(numbers).map(read)
    options = grain.ReadOptions(num_threads=min(_THREADS, len(numbers)), prefetch_buffer_size=len(numbers))
    return list(dataset.to_iter_dataset(options))


def need(*names: str) -> tuple[ModuleType, ...]:
    """Import modules of the extra `images`; raise a ValueError that names the missing ones."""
    found, missing = [], []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ImportError:
            missing.append({"PIL.Image": "Pillow", "grain": "Grain"}[name])
    if missing:
        raise ValueError(f"data: {' and '.join(missing)} is missing, to read images: pip install -e '.[images]'")
    return tuple(found)
