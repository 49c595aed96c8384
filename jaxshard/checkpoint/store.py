"""The only module that knows Orbax: named arrays into a folder and back, and which bytes belong to which array.

Orbax writes one data file per process (OCDBT), an index and some small files, however many arrays there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

ARRAYS = "arrays"
"""The folder of Orbax in the folder of a step."""
_STATE = "state"
_KEY = re.compile(r"(.*)/(?:c(?:/\d+)*|zarr\.json)", re.DOTALL)
_VALUE = re.compile(r"\w+:(.*?):(.*):(\d+):(\d+)")


class Extent(NamedTuple):
    """So many bytes of a file from `start` on, which are a part of an array."""

    start: int
    size: int
    array: int


def start(folder: Path, arrays: Mapping[str, jax.Array]) -> Callable[[], Any]:
    """Begins to save arrays into folder/arrays; returns the function that waits until all processes are done.

    The arrays are on the host when this returns, and may be donated. Every process calls it, and writes its shards.
    """
    from orbax.checkpoint.experimental import v1  # half a second, which only those pay who save

    context = v1.Context()
    saving = context.array.saving
    saving.use_compression = False  # weights do not compress, and it takes longer than writing
    saving.enable_write_sharding_file = False  # the layout says how arrays are spread
    saving.array_metadata_store = None
    context.asynchronous.create_directories_asynchronously = False  # where that fails, threads wait for 5 minutes
    with context:
        return v1.save_async(folder / ARRAYS, dict(arrays), checkpointable_name=_STATE).result


def load(folder: Path, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays in folder/arrays, spread as asked; every process reads the chunks that its shards lie in."""
    from orbax.checkpoint.experimental import v1

    loaded: dict[str, jax.Array] = v1.load(folder / ARRAYS, dict(arrays), checkpointable_name=_STATE)
    return loaded


def extents(folder: Path, names: Mapping[str, int]) -> dict[str, list[Extent]]:
    """Where the arrays lie in the files of a step, by the files' names relative to it; `names` numbers the arrays.

    Arrays of less than a kilobyte lie in the index itself and are not listed.
    """
    import tensorstore

    database = folder / ARRAYS / _STATE
    base = tensorstore.KvStore.open({"driver": "file", "path": f"{database}/"}).result()
    root = tensorstore.ocdbt.dump(base).result()["versions"][-1]["root"]
    found: dict[str, list[Extent]] = {}
    if "location" not in root:
        return found
    for key, value in _values(tensorstore.ocdbt.dump, base, root["location"], b""):
        name, place = _KEY.fullmatch(key.decode()), _VALUE.fullmatch(value)
        if name and place and name[1] in names:
            file = f"{ARRAYS}/{_STATE}/{place[1]}{place[2]}"
            found.setdefault(file, []).append(Extent(int(place[3]), int(place[4]), names[name[1]]))
    return found


def _values(dump: Any, base: Any, location: str, prefix: bytes) -> Iterator[tuple[bytes, str]]:
    """(key, location) of every value that lies outside of the nodes of the tree below a node."""
    for entry in dump(base, location).result()["entries"]:
        if "location" in entry:
            yield from _values(dump, base, entry["location"], prefix + entry["subtree_common_prefix"])
        elif "indirect_value" in entry:
            yield prefix + entry["key"], entry["indirect_value"]
