"""`js.hf.save`: write a trained model as a folder that transformers opens."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.checkpoint.manifest import write_atomically
from jaxshard.checkpoint.safetensors.header import Tensor
from jaxshard.checkpoint.safetensors.names import ModelArray, model_arrays
from jaxshard.checkpoint.safetensors.writer import MAX_BYTES, Output, write_model
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import spec_entry, split_dims
from jaxshard.core.settings import with_own_settings
from jaxshard.core.tree import raise_all
from jaxshard.data.tokenizer import BESIDE, FILE, find_tokenizer
from jaxshard.distributed.together import call_in_first_process
from jaxshard.hf.config import Config, make_config
from jaxshard.hf.folder import CONFIG, DRAWING, MORE_TEMPLATES, TOKENIZER, WEIGHTS
from jaxshard.hf.places import Place, find_places
from jaxshard.models.decoder import Decoder
from jaxshard.storage.copies import local_copy
from jaxshard.storage.paths import AnyPath, as_path

_POINT = "js.hf.save"


@with_own_settings
def save(
    folder: str | os.PathLike[str],
    run: Any,
    layout: Layout,
    *,
    model: Decoder | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_bytes: int = MAX_BYTES,
) -> AnyPath:
    """Write a trained model as a folder that transformers opens. Every process calls this.

    The folder gets config.json and model.safetensors, or several files with an index. A model from `js.hf.model` is
    written with the config.json it was built from, any other model as the first family of models that fits. Tensors
    keep their dtypes. As in `js.save_safetensors`, no host holds more than 16 MiB of an array at a time, and every
    tensor has a checksum. A tokenizer's files are copied, too.

    Args:
      folder: the folder, on a disk that all processes see, or an address s3://... or gs://... It must not contain a
        model.
      run: a `TrainState`, or only its parameters, as the layout stores them.
      layout: the layout of the run.
      model: the model, if the layout was not made from the model's own `init` (such as an unpickled layout).
      tokenizer: a tokenizer.json, or a folder that has one; it is copied together with the other files of the
        tokenizer. By default the tokenizer in the folder of `js.hf.model` is copied.
      max_bytes: the largest number of bytes of tensors in one file; at an address at most 1 GB.

    Returns:
      The absolute path of the folder, or its address as a `PathLike`.

    Raises:
      ValueError: the model belongs to no known family; the message names the arguments or arrays that do not match.
      FileExistsError: the folder contains a model.
      FileNotFoundError: there is no such tokenizer.
      OSError: a file could not be written.

    Example:
        model = js.hf.model("folder")
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
        run = js.init(model.init, tx, layout, 0, init_from=js.hf.load("folder", layout))
        js.hf.save("trained", run, layout)
    """
    check_layout("js.hf.save(folder, run, layout)", layout)
    folder = as_path(folder).absolute()
    known = model or layout.model
    if not isinstance(known, Decoder):
        raise ValueError("js.hf.save: the layout was not made from the init of a model of js.models; pass model=")
    arrays = model_arrays(run, layout)
    dtypes = {str(entry.dtype) for entry, _ in arrays}
    config = make_config(known, dtypes.pop() if len(dtypes) == 1 else "float32")
    places, problems = find_places(config.family, [entry for entry, _ in arrays], config.arguments)
    raise_all(problems, ValueError, "js.hf.save: the model is not one that transformers knows")
    beside = _files_beside(config, None if tokenizer is None else find_tokenizer(tokenizer))
    call_in_first_process(lambda: _check_free(folder), _POINT)
    outputs = list(_outputs(arrays, places, layout.mesh))
    write_model(folder / WEIGHTS, outputs, layout.mesh, max_bytes=max_bytes, metadata={"format": "pt"})
    call_in_first_process(lambda: _write_config(folder, config, beside), _POINT)
    return folder


def _check_free(folder: AnyPath) -> bool:
    if (folder / CONFIG).exists():
        raise FileExistsError(f"{folder / CONFIG} is there already; delete it, or choose another folder")
    return True


def _files_beside(config: Config, tokenizer: Path | None) -> dict[str, Path]:
    """Return {name in the new folder: file to copy}: generation_config.json, and the files of one tokenizer.

    Args:
      config: the converted config.json; its folder, if any, has these files.
      tokenizer: a tokenizer.json; None for the tokenizer in the folder of `config`.
    """
    own = None if config.folder is None else local_copy(config.folder, BESIDE)
    found = {} if own is None else {DRAWING: own / DRAWING}
    home = own
    if tokenizer is not None:
        home = tokenizer.parent
        found[FILE] = tokenizer
    if home is not None:
        found = {name: home / name for name in TOKENIZER} | found
        found |= {one.relative_to(home).as_posix(): one for one in home.glob(MORE_TEMPLATES)}
    return {name: file for name, file in found.items() if file.is_file()}


def _write_config(folder: AnyPath, config: Config, beside: dict[str, Path]) -> bool:
    for name, source in beside.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            write_atomically(folder / name, source.read_bytes())
    write_atomically(folder / CONFIG, json.dumps(config.entries, indent=2, sort_keys=True).encode() + b"\n")
    return True


def _outputs(arrays: list[ModelArray], places: list[Place], mesh: Mesh) -> Iterator[Output]:
    """Yield an `Output` (name, shape, and a function that returns the array) for every tensor to write.

    A stacked array has a tensor for each block, or for each expert of each block. Several arrays may share a tensor.
    """
    sharing: dict[str, list[int]] = {}
    for number, place in enumerate(places):
        sharing.setdefault(place.name, []).append(number)

    def convert(number: int) -> jax.Array:
        entry, stored = arrays[number]
        return entry.to_saved(stored, mesh)

    # Convert an array once for all of its tensors. Each process writes a file at a time, so keep the arrays of one
    # tensor per process.
    saved = functools.lru_cache(maxsize=jax.process_count() * max(map(len, sharing.values())))(convert)

    for name, numbers in sharing.items():
        numbers = sorted(numbers, key=lambda number: len(places[number].before))
        (entry, _), place = arrays[numbers[0]], places[numbers[0]]
        spec = _spec(place, entry.shape_saved(mesh).sharding.spec, mesh)
        tensor = Tensor(str(entry.dtype), place.shape, 0)
        cut = _jit_cut(mesh, spec, tuple(_hashable(places[number]) for number in numbers))
        for at in product(*map(range, place.counted)):
            yield Output(name.format(*at), tensor, functools.partial(_make, saved, cut, numbers, at), spec)


def _hashable(place: Place) -> tuple[Any, ...]:
    return place.counted, place.ours, place.theirs, tuple(place.sizes.items())


def _make(saved: Callable[[int], jax.Array], cut: Any, numbers: list[int], at: tuple[int, ...]) -> jax.Array:
    made: jax.Array = jax.block_until_ready(cut([saved(number) for number in numbers], at))
    return made


@functools.lru_cache(maxsize=512)
def _jit_cut(mesh: Mesh, spec: PartitionSpec, parts: tuple[tuple[Any, ...], ...]) -> Any:
    """Return a jitted function `(arrays, (block, expert)) -> tensor` that extracts a tensor of the files from arrays.

    The tensor is returned as unsigned integers with the same bits, so that NaNs are not changed.

    Args:
      mesh: the mesh.
      spec: the sharding of the tensor.
      parts: of each array that shares the tensor, the fields `counted`, `ours`, `theirs` and `sizes` of its `Place`, as
        hashable values, in the order of the tensor's first dimension.
    """
    places = [Place("", counted, ours, theirs, dict(sizes)) for counted, ours, theirs, sizes in parts]

    def cut_one(x: jax.Array, place: Place, at: tuple[Any, ...]) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")  # NaNs keep their bits
        for number in at:
            bits = jax.lax.dynamic_index_in_dim(bits, number, 0, keepdims=False)
        tensor: jax.Array = place.to_theirs(bits)
        return tensor

    def cut(arrays: list[jax.Array], at: tuple[Any, ...]) -> jax.Array:
        tensors = [cut_one(x, place, at) for x, place in zip(arrays, places, strict=True)]
        return tensors[0] if len(tensors) == 1 else jnp.concatenate(tensors)

    return jax.jit(cut, out_shardings=NamedSharding(mesh, spec))


def _spec(place: Place, stored: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """Choose a sharding of a tensor over the mesh axes of its array.

    An axis splits the same dimension as in the array, so that nothing moves. If the tensor has no such dimension, the
    axis splits the dimension with the most elements per device, of those that it divides evenly. An axis that divides
    no dimension is not used.

    Args:
      place: the mapping of the array to the tensor.
      stored: the sharding of the array.
      mesh: the mesh.
    """
    kept: dict[int, tuple[str, ...]] = {}
    for dim, axis in split_dims(stored):
        left = {at: size // axis_size(mesh, kept.get(at, ())) for at, size in enumerate(place.shape)}
        fits = [at for at, size in left.items() if size % mesh.shape[axis] == 0]
        letters = (*("" for _ in place.counted), *place.ours)[dim]
        same = [at for at in fits if place.theirs[at] == letters]
        if fits:
            chosen = same[0] if same else max(fits, key=left.__getitem__)
            kept[chosen] = (*kept.get(chosen, ()), axis)
    return PartitionSpec(*(spec_entry(kept.get(at, ())) for at in range(len(place.shape))))
