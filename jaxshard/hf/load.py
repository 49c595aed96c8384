"""`js.hf.model` and `js.hf.load`: build a model from a Hugging Face folder, and load its weights onto a layout."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.checkpoint.leaves import Entry, list_differences
from jaxshard.checkpoint.safetensors.header import Tensor
from jaxshard.checkpoint.safetensors.index import index_of
from jaxshard.checkpoint.safetensors.names import model_entries
from jaxshard.checkpoint.safetensors.parts import Range, Source, least_run, read_part
from jaxshard.checkpoint.safetensors.reader import StoredTensor, check_exists, open_files
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import axes_of, spec_entry
from jaxshard.core.settings import with_own_settings
from jaxshard.core.tree import map_with_path, path_str
from jaxshard.core.types import PyTree
from jaxshard.distributed.together import raise_together
from jaxshard.hf.config import Config, read_config
from jaxshard.hf.folder import WEIGHTS, find_folder
from jaxshard.hf.places import Place, find_places
from jaxshard.hf.text_part import name_in_text_part
from jaxshard.models.decoder import Decoder
from jaxshard.storage.paths import AnyPath

_POINT = "js.hf.load"


def model(folder: str | os.PathLike[str], *, dtype: Any = None, ignore: Iterable[str] = (), **changes: Any) -> Decoder:
    """Build a model from the config.json of a folder that transformers wrote.

    No weights are read: `js.hf.load` does that, and `model.init` draws random parameters.

    Args:
      folder: the folder, an address s3://... or gs://..., or "owner/name" of a model on the Hugging Face hub. A model
        of the hub is read from its cache; files that are not there are downloaded, unless HF_HUB_OFFLINE is set.
      dtype: the dtype of the parameters, such as "float32"; by default each parameter has the dtype of its tensor in
        the files, or the dtype in config.json if the folder has no weights.
      ignore: the names of unsupported entries of config.json to ignore, since they do not change the model's logits.
      **changes: arguments of the function of `js.models` that replace those from config.json, such as `seq=1024`.

    Returns:
      The model, a `js.Stacked` that every engine can run, as from `js.models.make`. Dropout rates in config.json are
      ignored; pass `dropout=0.1` for a GPT-2 with dropout.

    Raises:
      FileNotFoundError: there is no such folder or model.
      PermissionError, ConnectionError: the model is gated, or the hub can't be reached.
      ValueError: config.json has an unknown architecture or unsupported entries, which the message names, or the
        function of `js.models` refuses the arguments.

    Example:
        model = js.hf.model("folder")
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
        run = js.init(model.init, tx, layout, 0, init_from=js.hf.load("folder", layout))
    """
    folder = find_folder(folder)
    config = read_config(folder, ignore)
    made = config.family.make(**config.arguments | changes)
    read = config.family.make(**config.arguments) if changes else made
    made.config = config._replace(arguments=read.arguments)
    _set_dtypes(made, config, folder, dtype)
    return made


@with_own_settings
def load(folder: str | os.PathLike[str], layout: Layout, *, dtype: Any = None, ignore: Iterable[str] = ()) -> PyTree:
    """Read the model weights in a folder that transformers wrote, sharded as a layout says. Every process calls this.

    Each process reads only the slices that its devices store, one shard of one array at a time; of objects it reads
    ranges of bytes.

    Args:
      folder: the folder, as in `js.hf.model`, on a disk that all processes see. The weights are in model.safetensors,
        or in the files that model.safetensors.index.json lists.
      layout: a layout of the model that `js.hf.model` built from the folder.
      dtype: cast all tensors to this dtype. By default nothing is cast, and a tensor whose dtype differs from the
        layout's is refused.
      ignore: as in `js.hf.model`.

    Returns:
      Parameters like those of `model.init`: global arrays in model order, sharded over the mesh as the layout stores
      them; for `js.init(..., init_from=)`.

    Raises:
      FileNotFoundError: there is no such folder, or it has no weights.
      ValueError: a file that the index lists is missing, truncated or damaged; or tensors in the files and parameters
        of the model differ in names, shapes or dtypes. The message names all of them.

    Example:
        model = js.hf.model("folder")
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
        run = js.init(model.init, tx, layout, 0, init_from=js.hf.load("folder", layout))
    """
    check_layout("js.hf.load(folder, layout)", layout)
    folder = find_folder(folder, weights=True)
    config = read_config(folder, ignore)
    check_exists(folder / WEIGHTS, _POINT)
    found, problems = _open_weights(config, folder)
    raise_together(problems, ValueError, f"{folder}: its weights are not complete", point=_POINT)
    wanted, structure = model_entries(layout)
    places = _match(config, wanted, found, folder, dtype)
    sources = {name: one.source for name, one in found.items()}
    placed: list[Any] = [None] * len(wanted)
    # The largest arrays first, while the fewest others are in memory.
    for i in sorted(range(len(wanted)), key=lambda i: -math.prod(wanted[i].shape)):
        placed[i] = _place(wanted[i], places[i], sources, layout)
    return jax.tree.unflatten(structure, placed)


def _open_weights(config: Config, folder: AnyPath) -> tuple[dict[str, StoredTensor], list[str]]:
    """Map the weights in a folder; return ({full name of a tensor: tensor}, messages about damaged files).

    If the names lack the family's prefix ("model."), because only the inner model was saved, it is added. Of a model
    that reads images, the tensors are those of its language model, under the names in a file of it alone.
    """
    found, problems = open_files(folder / WEIGHTS)
    if config.reads_images:
        names = {name: name_in_text_part(name) for name in found}
        found = {text: found[name] for name, text in names.items() if text is not None}
    prefix = config.family.prefix
    if not any(name.startswith(prefix) for name in found):  # only the inner model was saved, as for GPT-2
        found = {name if name.startswith("lm_head.") else prefix + name: one for name, one in found.items()}
    return found, problems


def _match(
    config: Config, wanted: list[Entry], found: dict[str, StoredTensor], folder: AnyPath, dtype: Any
) -> list[Place]:
    """Find the tensors of each parameter in `wanted`; raise in all processes if any is missing, unknown or different.

    Args:
      config: the converted config.json.
      wanted: the parameters of the layout.
      found: {name: tensor} in the files.
      folder: the folder, for error messages.
      dtype: the dtype to which all tensors are cast; None to cast none.

    Returns:
      A `Place` for each parameter, which maps it to its tensors.
    """
    places, problems = find_places(config.family, wanted, config.arguments)
    cast = None if dtype is None else str(jnp.dtype(dtype))
    expected = {
        name: str(Tensor(str(entry.dtype), place.shape, 0))
        for entry, place in zip(wanted, places)
        for name in place.names
    }
    unused = {name for name in found if re.fullmatch(config.family.unused, name)} - set(expected)
    unused |= _repeated_head(config, found, expected)
    there = {
        name: str(one.tensor if cast is None else one.tensor._replace(dtype=cast))
        for name, one in found.items()
        if name not in unused
    }
    if not problems:
        problems = list_differences(there, expected)
    headline = (
        f"{folder}: its tensors differ from this layout, and no tensor is left out, or cast unless asked for: make the "
        "model with js.hf.model of this folder; for another dtype give dtype= to js.hf.model and to js.hf.load"
    )
    raise_together(problems, ValueError, headline, point=_POINT)
    return places


def _repeated_head(config: Config, found: dict[str, StoredTensor], expected: dict[str, str]) -> set[str]:
    """Return {"lm_head.weight"} if the files of a tied model have this redundant tensor, otherwise an empty set.

    A tied model uses the embedding table as its output matrix. The tensor is redundant if it equals the table.
    """
    rows = {ours: theirs for ours, theirs, _ in config.family.rows()}
    head, table = found.get("lm_head.weight"), found.get(next(iter(rows.values())))
    if head is None or table is None or "lm_head.weight" in expected or head.tensor[:2] != table.tensor[:2]:
        return set()
    # Compare some 4 Mi elements at a time, instead of reading both matrices into memory.
    rows_at_once = max(1, (1 << 22) // max(1, head.tensor.size // head.tensor.shape[0]))
    for at in range(0, head.tensor.shape[0], rows_at_once):
        ranges = [Range(at, min(at + rows_at_once, head.tensor.shape[0])), Range(0, head.tensor.shape[1])]
        one, other = (read_part(x.source, x.tensor.shape, ranges).reshape(-1).view(np.uint8) for x in (head, table))
        if not np.array_equal(one, other):
            return set()
    return {"lm_head.weight"}


def _place(entry: Entry, place: Place, sources: dict[str, Source], layout: Layout) -> jax.Array:
    """Read an array shard by shard, and copy each shard to the devices that store it.

    A shard that is scattered in the file is slow to read. Then contiguous shards are read, in the sharding that
    `_readable` returns, and resharded on the devices.
    """
    wanted = entry.shape_saved(layout.mesh).sharding
    least = least_run(sources[place.names[0]].file)
    sharding = _readable(entry, place, wanted, layout.mesh, least)
    devices: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(entry.shape).items():
        cut = tuple(slice(*one.indices(size)) for one, size in zip(index or (), entry.shape))
        devices.setdefault(tuple((one.start, one.stop) for one in cut), []).append(device)
    parts = []
    for bounds, holders in devices.items():
        part = place.read(sources, tuple(slice(*bound) for bound in bounds), entry.dtype)
        parts += [jax.block_until_ready(jax.device_put(part, device)) for device in holders]
    read = jax.make_array_from_single_device_arrays(entry.shape, sharding, parts)
    return read if sharding is wanted else jax.block_until_ready(_jit_move(wanted)(read))


def _readable(entry: Entry, place: Place, wanted: NamedSharding, mesh: Mesh, least: int) -> NamedSharding:
    """Return the sharding in which to read an array: `wanted`, or a sharding whose shards are contiguous in the files.

    To read a column of a matrix from a file, all of the matrix must be read. So if the shards of `wanted` are scattered
    in the files, in ranges of fewer than `least` bytes, the array is split over the same mesh axes along another
    dimension, and resharded on the devices later.
    """
    counted = len(place.counted)  # these dimensions count tensors, so their sharding may stay
    axes = axes_of(PartitionSpec(*wanted.spec[counted:]))
    if place.run(wanted.shard_shape(entry.shape)) * jnp.dtype(entry.dtype).itemsize >= least or not axes:
        return wanted
    fits = [dim for dim in place.first_dims() if entry.shape[dim] % axis_size(mesh, axes) == 0]
    if not fits:
        return wanted
    split = (spec_entry(axes if dim == fits[0] else ()) for dim in range(counted, len(entry.shape)))
    return NamedSharding(mesh, PartitionSpec(*wanted.spec[:counted], *split))


@functools.lru_cache(maxsize=64)
def _jit_move(wanted: NamedSharding) -> Any:
    def move(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")  # NaNs keep their bits
        return jax.lax.bitcast_convert_type(jax.lax.with_sharding_constraint(bits, wanted), x.dtype)

    return jax.jit(move, out_shardings=wanted)


def _set_dtypes(made: Decoder, config: Config, folder: AnyPath, dtype: Any) -> None:
    """Change `made.init` so that it returns each parameter in the dtype of its tensor in the files, or in `dtype`."""
    original = made.init_parts
    there = (folder / WEIGHTS).exists() or index_of(folder / WEIGHTS).exists()
    found = _open_weights(config, folder)[0] if there and dtype is None else {}
    names = {ours: theirs for ours, theirs, _ in config.family.rows()}
    default = dtype or config.entries.get("dtype") or config.entries.get("torch_dtype") or "float32"

    def cast(path: Any, x: jax.Array) -> jax.Array:
        ours = ".".join(path_str(path).split("/")).replace("block.", "blocks.", 1)
        tensor = found.get(names.get(ours, "").format(0, 0))
        return x.astype(default if tensor is None else tensor.tensor.dtype)

    made.init_parts = lambda key: map_with_path(cast, original(key))
