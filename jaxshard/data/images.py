"""Images with labels, from arrays in a .npz file or a folder of files, and augmented batches of them.

A data set of images is indexed: `dataset[i]` is {"image": uint8[H, W, C], "label": int}.
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int

from jaxshard.core.local_path import local_path
from jaxshard.data.corpus import HELD_OUT
from jaxshard.data.examples import Indexed
from jaxshard.data.image_files import ImageFolder, open_folder, read_in_parallel, resize
from jaxshard.data.source import draw_indices

Augment = Literal["none", "shift", "flip", "crop"]

_NAMES = (
    ("images", "labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
)
"""The names of arrays in a .npz file; the last two, the test part, are optional."""
_FORMS = "a .npz file, or a folder with a folder of files for each class"
_HASHED = 2**20
"""The most elements of an array that are hashed."""


class Images(NamedTuple):
    """Images to train on and images held out.

    Attributes:
      name: the name of the file or folder.
      train: the data set to train on.
      held_out: the data set to evaluate on.
      classes: the names of the classes, by label.
      side: height and width of all images; None if they differ, so that they must be resized.
      channels: 3 for colours, 1 for grey.
      digest: SHA-256, in hexadecimal, of labels and pixels (at most 2**20 of them, evenly spaced), or of the names and
        sizes of files.
    """

    name: str
    train: Indexed
    held_out: Indexed
    classes: tuple[str, ...]
    side: int | None
    channels: int
    digest: str


@dataclass(frozen=True)
class ImageArrays:
    """A data set of arrays: images uint8[N, H, W, C] and labels int[N]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {"image": self.images[index], "label": int(self.labels[index])}


@dataclass(frozen=True)
class ImageRows:
    """The source that `images` makes.

    Attributes:
      dataset: images with labels.
      batch: the number of global rows of a step.
      seed: the random seed of order and augmentation.
      side: height and width of the images of a batch.
      augment: the kind of augmentation.
    """

    dataset: Indexed
    batch: int
    seed: int
    side: int
    augment: Augment

    def rows(self, step: int, rows: Int[np.ndarray, " rows"]) -> dict[str, np.ndarray]:
        """Read global rows of the batch of a step, and only these images.

        Returns:
          {"images": uint8[len(rows), side, side, C], "labels": int32[len(rows)]}

        Raises:
          ValueError: a row outside the batch, a negative step; a file that can't be read as an image, by name.
        """
        numbers = draw_indices(step, rows, batch=self.batch, size=len(self.dataset), seed=self.seed)

        def read(at: int) -> dict[str, Any]:
            # Seeded by the row of the global batch, so the result does not depend on the process that reads it.
            random = np.random.default_rng((self.seed, step, int(rows[at])))
            example: dict[str, Any] = self.dataset[int(numbers[at])]
            return example | {"image": augmented(example["image"], self.side, self.augment, random)}

        return _stack(self.dataset, read, len(numbers))


def images(dataset: Indexed, *, batch: int, seed: int, side: int | None = None, augment: Augment = "none") -> ImageRows:
    """Make a source of `batch` images a step, shuffled anew in every epoch.

    Order and augmentation depend only on (seed, step, row): neither on the number of processes, each of which reads its
    own rows, nor on the step at which a run resumes.

        source = js.data.images(js.data.load_images("cifar.npz").train, batch=256, seed=0, augment="flip")
        for batch in js.batches(source, layout): ...

    Args:
      dataset: anything with a length whose `dataset[i]` is {"image": uint8[H, W, C], "label": int}: what
        `js.data.load_images` or `js.data.digits` has as `train`, a `grain.MapDataset`, a list.
      batch: the number of global rows of a step.
      seed: the random seed of order and augmentation.
      side: height and width of the images of a batch; None for those of the first image. Other images are resized, the
        shorter side to 8/7 of it, and cropped at the centre; this needs Pillow (the extra `images`).
      augment: "none"; "shift" moves an image by up to an eighth of its side each way, filled with black; "flip" also
        mirrors half of the images, left to right; "crop" takes a part of 8 to 100 % of the area with an aspect ratio of
        3/4 to 4/3, resizes it and mirrors half of the images (Szegedy et al. 2015, "Going Deeper with Convolutions",
        section 6).

    Returns:
      A source of {"images": uint8[batch, side, side, C], "labels": int32[batch]}.

    Raises:
      ValueError: an empty data set, a batch or side below 1, or an unknown augmentation.

    Example:
        source = js.data.images(js.data.digits(train=64, held_out=16).train, batch=8, seed=0, augment="shift")
    """
    if batch < 1 or len(dataset) < 1 or (side is not None and side < 1):
        raise ValueError(f"images: {len(dataset)} images in batches of {batch}, of side {side}; all must be at least 1")
    if augment not in get_args(Augment):
        raise ValueError(f"images: augment must be one of {', '.join(get_args(Augment))}, got {augment!r}")
    return ImageRows(dataset, batch, seed, dataset[0]["image"].shape[0] if side is None else side, augment)


def eval_images(
    dataset: Indexed, *, batch: int, side: int | None = None, limit: int | None = None
) -> list[dict[str, np.ndarray]]:
    """Read batches of held-out images: all images, or evenly spaced ones.

    Args:
      dataset: see `images`.
      batch: the number of images in a batch; the last may be shorter.
      side: height and width, as in `images`.
      limit: the largest number of images; None for all.

    Returns:
      A list of {"images", "labels"}, with all global rows, the same on every host.

    Example:
        held_out = js.data.eval_images(js.data.digits(train=64, held_out=16).held_out, batch=8)
        held_out[0]["images"].shape      # (8, 32, 32, 3)
    """
    source = images(dataset, batch=batch, seed=0, side=side)
    count = min(len(dataset), limit or len(dataset))
    chosen = np.arange(count) * len(dataset) // count

    def read(number: int) -> dict[str, Any]:
        example: dict[str, Any] = dataset[number]
        return example | {"image": augmented(example["image"], source.side, "none", None)}

    parts = np.split(chosen, range(batch, count, batch))
    return [_stack(dataset, lambda at, part=part: read(int(part[at])), len(part)) for part in parts]  # type: ignore[misc]


def load_images(path: str | Path) -> Images:
    """Load the images at a path: arrays, or a folder of files.

    - A `.npz` file with arrays "images" uint8[N, H, W, C] (or [N, H, W], grey) and "labels" int[N], and optionally
      "test_images" and "test_labels"; or with "x_train", "y_train", "x_test", "y_test". Without a test part 8 % are
      held out.
    - A folder with a folder of files for each class: PNG, JPEG and all other formats of Pillow, read as RGB. If it has
      folders "train" and "val" (or "test"), these contain the classes. Else 8 % of the files are held out, by a hash of
      their paths. Files are read lazily and in parallel by Grain; this needs the extra `images`.

    Raises:
      FileNotFoundError: nothing at the path.
      ValueError: another kind of file, arrays with other names, shapes or dtypes, a folder without classes, or Grain or
        Pillow is missing. Later, when it is read: a file that is not an image, by name.

    Example:
        images = js.data.load_images("photos.npz")
        source = js.data.images(images.train, batch=8, seed=0)
    """
    path = local_path(path)
    if not path.exists():
        raise FileNotFoundError(f"data: {path} does not exist; give {_FORMS}")
    if path.is_dir():
        train, held_out, classes = open_folder(path)
        digest = hashlib.sha256("\n".join([*train.facts(), *held_out.facts()]).encode()).hexdigest()
        return Images(path.resolve().name, train, held_out, classes, None, 3, digest)
    if path.suffix != ".npz":
        raise ValueError(f"data: {path} holds no images; give {_FORMS}")
    return _load_arrays(path)


def augmented(image: np.ndarray, side: int, augment: Augment, random: np.random.Generator | None) -> np.ndarray:
    """Resize and augment an image to uint8[side, side, C]; see `images`."""
    if augment == "crop":
        assert random is not None
        image = resize(image, side, box=_draw_box(image.shape[:2], random))
    elif image.shape[:2] != (side, side):
        image = resize(image, side)
    if augment in ("shift", "flip"):
        assert random is not None
        reach = side // 8
        down, right = random.integers(0, 2 * reach + 1, 2)
        image = np.pad(image, ((reach, reach), (reach, reach), (0, 0)))[down : down + side, right : right + side]
    if augment in ("flip", "crop"):
        assert random is not None
        image = image[:, ::-1] if random.random() < 0.5 else image
    return image


def _draw_box(shape: tuple[int, int], random: np.random.Generator) -> tuple[float, float, float, float]:
    """Draw (left, top, right, bottom) of a part of an image; the centred square if ten draws don't fit."""
    height, width = shape
    for _ in range(10):
        area, ratio = random.uniform(0.08, 1) * height * width, np.exp(random.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = np.sqrt(area * ratio), np.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return (left, top, left + w, top + h)
    short = min(height, width)
    return ((width - short) / 2, (height - short) / 2, (width + short) / 2, (height + short) / 2)


def _stack(dataset: Indexed, read: Callable[[int], dict[str, Any]], count: int) -> dict[str, np.ndarray]:
    """Read `count` examples, at least one, and stack them."""
    numbers = list(range(count))
    parallel = isinstance(dataset, ImageFolder)
    found: Sequence[dict[str, Any]] = read_in_parallel(read, numbers) if parallel else [read(at) for at in numbers]
    if not found:
        raise ValueError("images: asked for no rows of a batch")
    return {
        "images": np.stack([example["image"] for example in found]),
        "labels": np.array([example["label"] for example in found], np.int32),
    }


def _load_arrays(path: Path) -> Images:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            names = next((names for names in _NAMES if set(names[:2]) <= set(file.files)), None)
            if names is None:
                asked = " or ".join(" and ".join(map(repr, names[:2])) for names in _NAMES)
                raise ValueError(f"it has the arrays {', '.join(file.files) or 'none'}, but must have {asked}")
            arrays = {name: file[name] for name in names if name in file.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"data: {path} can't be read as images: {' '.join(str(error).split())}") from error
    parts = [_check_arrays(path, arrays, *pair) for pair in (names[:2], names[2:]) if set(pair) <= set(arrays)]
    if len(parts) == 1:
        held = np.zeros(len(parts[0]), bool)
        held[np.random.default_rng(0).permutation(len(held))[: max(1, int(len(held) * HELD_OUT))]] = True
        parts = [ImageArrays(parts[0].images[mask], parts[0].labels[mask]) for mask in (~held, held)]
    train, held_out = parts
    if not len(train) or not len(held_out):
        raise ValueError(f"data: {path} has {len(train)} images to train on and {len(held_out)} held out; give more")
    if train.images.shape[1:] != held_out.images.shape[1:]:
        shapes = " and ".join(str(list(part.images.shape[1:])) for part in parts)
        raise ValueError(f"data: {path} has images of shapes {shapes} to train on and to evaluate on; give one shape")
    classes = tuple(map(str, range(1 + max(int(part.labels.max()) for part in parts))))
    _, height, width, channels = train.images.shape
    digest = hashlib.sha256()
    for part in parts:
        every = max(1, part.images.size // _HASHED)
        digest.update(f"{part.images.shape}".encode())
        digest.update(np.ascontiguousarray(part.images.reshape(-1)[::every]).data)
        digest.update(np.ascontiguousarray(part.labels).data)
    return Images(
        path.name, train, held_out, classes, height if height == width else None, channels, digest.hexdigest()
    )


def _check_arrays(path: Path, arrays: dict[str, np.ndarray], images_name: str, labels_name: str) -> ImageArrays:
    """Convert arrays to [N, H, W, C] and int32[N]; raise ValueError for other shapes and dtypes."""
    images, labels = arrays[images_name], arrays[labels_name]
    if labels.ndim == 2 and labels.shape[1] == 1:  # like the labels of CIFAR in Keras
        labels = labels[:, 0]
    images = images[..., None] if images.ndim == 3 else images
    if images.ndim != 4 or images.dtype != np.uint8:
        raise ValueError(
            f"data: {path}: {images_name!r} must be uint8 [images, height, width, channels], got "
            f"{images.dtype}{list(images.shape)}; scale floats to 0 to 255"
        )
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer) or labels.min(initial=0) < 0:
        raise ValueError(
            f"data: {path}: {labels_name!r} must be whole numbers from 0 on, one for each of {len(images)} images, got "
            f"{labels.dtype}{list(labels.shape)}"
        )
    return ImageArrays(images, labels.astype(np.int32))
