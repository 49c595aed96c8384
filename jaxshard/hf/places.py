"""Map the arrays of a model of `js.models` to the tensors in Hugging Face files: names, dimensions, and slices.

An array of jaxshard is [*counted, *dims]. The counted dimensions are blocks (and experts), each of which has its own
tensor in the files. Every other dimension is written as a product of letters: in "c h3d" the first dimension has the
size c, and the second the size h * 3 * d. The dimensions of the tensor are products of the same letters in another
order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
from numpy.typing import NDArray

from jaxshard.checkpoint.leaves import Entry
from jaxshard.checkpoint.safetensors.parts import Range, Source, allocate, read_part
from jaxshard.hf.families import Family


class Place(NamedTuple):
    """The mapping of an array of jaxshard to tensors in the files, for reading and for writing.

    An array has a dimension for blocks (and one for experts). Each block (or expert) has a tensor of its own in the
    files; these are the counted dimensions. A letter stands for a size, and several letters for their product: "hd" is
    h * d.

    Attributes:
      name: the name of the tensors, with {} for the index along each counted dimension.
      counted: the sizes of the array's counted dimensions, blocks and experts.
      ours: the letters of each other dimension of the array, such as ("c", "h", "d").
      theirs: the letters of each dimension of the tensors, such as ("hd", "c").
      sizes: {letter: size}.
      before, after: the letters of what is before and after the array in the tensor's first dimension, for a tensor
        that several arrays share: "hd+[kd]+kd" is ("hd",) and ("kd",).
    """

    name: str
    counted: tuple[int, ...]
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    sizes: dict[str, int]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors of the array: of each block, or of each expert of each block."""
        return [self.name.format(*at) for at in product(*map(range, self.counted))]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a tensor; all tensors of an array have the same shape."""
        first, *others = self._part_shape
        return (first + sum(map(self._size, (*self.before, *self.after))), *others)

    @property
    def _part_shape(self) -> tuple[int, ...]:
        """The shape of the array in a tensor, which is the tensor's shape unless several arrays share it."""
        return tuple(self._size(letters) for letters in self.theirs)

    def _size(self, letters: str) -> int:
        return math.prod(self.sizes[letter] for letter in letters)

    def run(self, shape: tuple[int, ...]) -> int:
        """Return how many elements of a shard are contiguous in the files, at least.

        Args:
          shape: the shape of the shard.
        """
        lengths = dict(self.sizes)
        for size, letters in zip(shape[len(self.counted) :], self.ours):
            lengths[letters[0]] = -(-size // self._size(letters[1:]))
        order = "".join(self.theirs)
        # Contiguous are all letters after the last that is read only partly.
        cut = max((at for at, letter in enumerate(order) if lengths[letter] < self.sizes[letter]), default=0)
        return math.prod(lengths[letter] for letter in order[cut:])

    def first_dims(self) -> list[int]:
        """Return the dimensions of the array in their order in the files, without those of blocks and experts.

        Slices along the first returned dimension are contiguous in the files.
        """
        order = "".join(self.theirs)
        dims = range(len(self.ours))
        return [len(self.counted) + dim for dim in sorted(dims, key=lambda dim: order.index(self.ours[dim][0]))]

    def read(self, found: Mapping[str, Source], index: tuple[slice, ...], dtype: Any) -> NDArray[Any]:
        """Read a slice of the array from the tensors in the files, cast to `dtype`.

        Args:
          found: {name of a tensor: its place in the files}.
          index: the slice of each dimension of the array.
          dtype: the dtype of the result.
        """
        counted = [range(*cut.indices(size)) for cut, size in zip(index, self.counted)]
        ranges = [
            Range(*cut.indices(self._size(letters))[:2]) for cut, letters in zip(index[len(counted) :], self.ours)
        ]
        part = allocate([*map(len, counted), *(end - start for start, end in ranges)], jnp.dtype(dtype))
        for number, at in zip(product(*map(range, part.shape[: len(counted)])), product(*counted)):
            part[number] = self._read_one(found[self.name.format(*at)], ranges)
        return part

    def _read_one(self, source: Source, ranges: list[Range]) -> NDArray[Any]:
        wanted, cuts = {letter: Range(0, size) for letter, size in self.sizes.items()}, []
        for (start, end), letters in zip(ranges, self.ours):
            inner = self._size(letters[1:])
            first = Range(start // inner, -(-end // inner))  # the smallest range of the first letter that covers it
            wanted[letters[0]] = first
            cuts.append(slice(start - first.start * inner, end - first.start * inner))
        theirs, ours = "".join(self.theirs), "".join(self.ours)
        start = sum(map(self._size, self.before)) * math.prod(self._part_shape[1:]) * jnp.dtype(source.dtype).itemsize
        source = source._replace(offset=source.offset + start)
        read = read_part(source, [self.sizes[x] for x in theirs], [wanted[x] for x in theirs])
        transposed = read.transpose([theirs.index(x) for x in ours])
        lengths = [math.prod(wanted[x].end - wanted[x].start for x in letters) for letters in self.ours]
        return transposed.reshape(lengths)[tuple(cuts)]

    def to_theirs(self, ours: Any) -> Any:
        """Transpose and reshape a part of the array to its (part of a) tensor in the files, in NumPy or JAX.

        `ours` is the part of one block (and expert), without the counted dimensions. Example: [c, h, d] -> [h * d, c].
        """
        letters, order = "".join(self.ours), "".join(self.theirs)
        by_letter = ours.reshape([self.sizes[x] for x in letters])
        return by_letter.transpose([letters.index(x) for x in order]).reshape(self._part_shape)


def find_places(family: Family, wanted: Iterable[Entry], arguments: Mapping[str, Any]) -> tuple[list[Place], list[str]]:
    """Find the tensors of each array of a model, by the family's table of names.

    Args:
      family: the family of models.
      wanted: the arrays.
      arguments: the arguments of `family.make`, which have the numbers of heads.

    Returns:
      (a `Place` for each array, messages about arrays that the family lacks or whose shapes do not match).
    """
    rows = {ours: (theirs, dims) for ours, theirs, dims in family.rows()}
    known = {"h": arguments["heads"], "k": arguments.get("kv_heads")}
    places, problems = [], []
    for entry in wanted:
        if entry.path not in rows:
            problems.append(f"{entry.path}: {entry.dtype}{list(entry.shape)} has no place in a {family.architecture}")
            continue
        name, dims = rows[entry.path]
        counted = name.count("{}")
        theirs, ours = (tuple(side.split()) for side in dims.split(">"))
        before, first, after = _split_sum(theirs[0])
        sizes = _solve(ours, entry.shape[counted:], known)
        if sizes is None:
            problems.append(f"{entry.path}: {list(entry.shape)} is no {dims.split('>')[1].strip()!r} of this model")
            continue
        sizes |= {x: size for x, size in known.items() if size is not None and x not in sizes}
        places.append(Place(name, entry.shape[:counted], ours, (first, *theirs[1:]), sizes, before, after))
    return places, problems


def _split_sum(letters: str) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Split the first dimension of a tensor at the part in brackets: "hd+[kd]+kd" to (("hd",), "kd", ("kd",))."""
    if "[" not in letters:
        return (), letters, ()
    before, _, rest = letters.partition("[")
    own, _, after = rest.partition("]")
    return tuple(filter(None, before.split("+"))), own, tuple(filter(None, after.split("+")))


def _solve(dims: tuple[str, ...], shape: tuple[int, ...], known: Mapping[str, Any]) -> dict[str, int] | None:
    """Find the size of each letter from the shape of an array: ("c", "hd") and (64, 48) with h=4 give c=64, d=12.

    Args:
      dims: the letters of each dimension.
      shape: the size of each dimension.
      known: {letter: size} of letters that are known before. A dimension may have one unknown letter.

    Returns:
      {letter: size}, or None if the shape does not match.
    """
    if len(dims) != len(shape):
        return None
    sizes: dict[str, int] = {}
    for letters, size in zip(dims, shape):
        # A letter alone is the size of its dimension; in a product all letters but one must be known.
        apart = {x: int(x) if x.isdigit() else known.get(x) for x in letters} if len(letters) > 1 else {letters: size}
        rest = math.prod(x for x in apart.values() if x is not None)
        unknown = [x for x, length in apart.items() if length is None]
        if size % rest or len(unknown) > 1:
            return None
        sizes |= {x: size // rest if length is None else length for x, length in apart.items()}
        if math.prod(sizes[x] for x in letters) != size:
            return None
    return sizes
