"""`load_safetensors` and `from_bytes`: a model onto any layout, every device reading its part alone."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxshard.checkpoint.leaves import Entry
from jaxshard.checkpoint.safetensors.header import Header, Tensor, length_of, parse
from jaxshard.checkpoint.safetensors.names import tensors
from jaxshard.checkpoint.safetensors.writer import INDEX, tensor_of
from jaxshard.core.keys import key_impl_of
from jaxshard.core.layout import Layout
from jaxshard.core.tree import raise_all
from jaxshard.core.types import PyTree

_BLOCK = 1 << 22


class Found(NamedTuple):
    """One tensor of a file: what it is, its bytes (of a file they are mapped, not read), its checksum if it has one."""

    file: str
    tensor: Tensor
    raw: np.ndarray
    crc32: int | None

    @property
    def array(self) -> np.ndarray:
        return self.raw.view(self.tensor.dtype).reshape(self.tensor.shape)


def load_safetensors(path: str | os.PathLike[str], layout: Layout, *, verify: bool = True) -> PyTree:
    """The model in a safetensors file, or in the files of its index: what `init_fn` returns, spread over the mesh.

    The way into a run, which stores it as the layout says:

        run = js.init(init_fn, tx, layout, key, init_from=js.load_safetensors("model.safetensors", layout))

    Every process calls this, and copies from the files what its devices need. `verify` compares the bytes with the
    checksums first, a share of the tensors in each process; files that `save_safetensors` did not write have none.

    Raises:
      ValueError: a tensor is missing, unknown, or has another shape or dtype than the layout (every such tensor is
        named, nothing is cast); a file is damaged, cut off or no safetensors file.
      FileNotFoundError: there is no such file, nor an index of it.
    """
    path = Path(path).absolute()
    found, problems = _files(path)
    return _loaded(str(path), found, problems, layout, verify=verify)


def from_bytes(raw: bytes, layout: Layout) -> PyTree:
    """The model in the bytes of a safetensors file, as `load_safetensors` returns it; every process gives the same.

    Raises:
      ValueError: as `load_safetensors`.
    """
    problems: list[str] = []
    found = _opened("the bytes", np.frombuffer(raw, np.uint8), problems)
    return _loaded("the bytes", found, problems, layout, verify=True)


def _loaded(what: str, found: dict[str, Found], problems: list[str], layout: Layout, *, verify: bool) -> PyTree:
    wanted, structure = tensors(layout)
    _raise_everywhere(problems, f"{what}: not a complete model")
    problems = _differences(found, {entry.path: tensor_of(entry) for entry in wanted})
    _raise_everywhere(
        problems,
        f"{what}: the tensors are not those of this layout's model, and nothing is cast or left out; make the layout "
        "from the init_fn that they are of",
    )
    if verify:
        mine = sorted(found)[jax.process_index() :: jax.process_count()]
        wrong = (f"{found[name].file}: tensor {name!r}" for name in mine if _is_damaged(found[name]))
        _raise_everywhere([f"{text}: its bytes are not those that were saved" for text in wrong], f"{what} is damaged")
    return jax.tree.unflatten(structure, [_spread(entry, found[entry.path].array, layout) for entry in wanted])


def _spread(entry: Entry, array: np.ndarray, layout: Layout) -> jax.Array:
    """A tensor on the devices in model order, split as far as the layout stores it split."""
    sharding = entry.shape_saved(layout.mesh).sharding
    x = jax.make_array_from_callback(array.shape, sharding, lambda index: read(array, index))
    return jax.random.wrap_key_data(x, impl=key_impl_of(entry.dtype)) if entry.is_key else x


def read(array: np.ndarray, index: Any) -> np.ndarray:
    """A copy of a part of a tensor: what a device is given."""
    return np.array(array[index], order="C")


def _is_damaged(found: Found) -> bool:
    if found.crc32 is None:
        return False
    crc = 0
    for at in range(0, found.raw.size, _BLOCK):
        crc = zlib.crc32(found.raw[at : at + _BLOCK].data, crc)
    return crc != found.crc32


def _differences(found: Mapping[str, Found], wanted: Mapping[str, Tensor]) -> list[str]:
    problems = [f"{name}: missing, expected {_str(wanted[name])}" for name in wanted if name not in found]
    problems += [f"{name}: {_str(found[name].tensor)}, not in the layout" for name in found if name not in wanted]
    return problems + [
        f"{name}: {_str(found[name].tensor)}, expected {_str(wanted[name])}"
        for name in wanted
        if name in found and _str(found[name].tensor) != _str(wanted[name])
    ]


def _str(tensor: Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"


def _files(path: Path) -> tuple[dict[str, Found], list[str]]:
    """The tensors of a file, or of the files of its index, and what is wrong with them."""
    problems: list[str] = []
    index = path if path.name.endswith(INDEX) else path.with_name(path.name + INDEX)
    if index != path and (path.exists() or not index.exists()):
        return _mapped(path, problems), problems
    try:
        weights = _weights(index.read_bytes())
    except (OSError, ValueError) as error:
        _note(problems, index, error)
        return {}, problems
    found: dict[str, Found] = {}
    for name in sorted(set(weights.values())):
        file = index.with_name(name)
        there = _mapped(file, problems)
        problems += [
            f"{file}: tensor {tensor!r} is not of it by the index" for tensor in there if weights.get(tensor) != name
        ]
        if there:
            missing = [tensor for tensor, at in weights.items() if at == name and tensor not in there]
            problems += [f"{file}: tensor {tensor!r} is missing, by the index it lies there" for tensor in missing]
        found |= there
    return found, problems


def _weights(raw: bytes) -> dict[str, str]:
    """Which tensor lies in which file."""
    try:
        fields = json.loads(raw.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    weights = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(weights, dict) or not all(map(_is_plain, weights.values())):
        raise ValueError("it has no weight_map of tensors to files beside it")
    return weights


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name and name.isprintable()


def _mapped(file: Path, problems: list[str]) -> dict[str, Found]:
    try:
        size = file.stat().st_size
        raw = np.memmap(file, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except (OSError, ValueError) as error:
        _note(problems, file, error)
        return {}
    return _opened(str(file), raw, problems)


def _opened(file: str, raw: np.ndarray, problems: list[str]) -> dict[str, Found]:
    try:
        made = _parsed(lambda size: raw[:size].tobytes(), raw.size)
    except ValueError as error:
        problems.append(f"{file}: {error}")
        return {}
    data = raw[made.length :]
    return {
        name: Found(file, tensor, data[tensor.start : tensor.start + tensor.size], made.sums.get(name))
        for name, tensor in made.tensors.items()
    }


def _parsed(first: Callable[[int], bytes], size: int) -> Header:
    return parse(first(length_of(first(8), size)), size)


def _note(problems: list[str], file: Path, error: OSError | ValueError) -> None:
    reason = error.strerror if isinstance(error, OSError) else error
    problems.append(f"{file}: {reason}")


def _raise_everywhere(problems: list[str], headline: str) -> None:
    """Raises in all processes what any of them found."""
    if jax.process_count() > 1:
        counts = np.asarray(multihost_utils.process_allgather(np.int32(len(problems)))).ravel()
        elsewhere = [index for index in np.flatnonzero(counts).tolist() if index != jax.process_index()]
        problems = problems + [f"process {index} found something wrong, and names it" for index in elsewhere]
    raise_all(problems, ValueError, headline)
