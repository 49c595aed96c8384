"""The only module that knows Orbax: named arrays into a folder and back, and which bytes belong to which array.

Orbax writes one data file per process (OCDBT), an index and some small files, however many arrays there are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxshard.checkpoint.snapshot import Pieces

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


def save(folder: Path, arrays: Mapping[str, Pieces], name: str) -> None:
    """Writes arrays into folder/arrays; every process calls it with its own pieces, and all return together.

    No device takes part, and processes wait for each other through the coordinator, by a name that no other save has:
    training may go on meanwhile.
    """
    from orbax.checkpoint import args

    with _checkpointer(name, set(range(jax.process_count()))) as checkpointer:
        checkpointer.save(folder / ARRAYS, args.Composite(**{_STATE: args.PyTreeSave(dict(arrays))}))


def load(folder: Path, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays in folder/arrays, spread as asked; every process reads the chunks that its shards lie in.

    Processes don't wait for each other.
    """
    from orbax.checkpoint import ArrayRestoreArgs, args

    wanted = {
        path: ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype) for path, x in arrays.items()
    }
    with _checkpointer("load", {jax.process_index()}) as checkpointer:
        restore = args.PyTreeRestore(dict(arrays), restore_args=wanted)
        loaded: Mapping[str, Any] = checkpointer.restore(folder / ARRAYS, args.Composite(**{_STATE: restore}))
    return dict(loaded[_STATE])


def _checkpointer(name: str, processes: set[int]) -> Any:
    """Orbax as it is used here; with the processes given, its barriers are those of the coordinator."""
    import orbax.checkpoint as ocp  # half a second, which only those pay who save

    together = ocp.options.MultiprocessingOptions(active_processes=processes, barrier_sync_key_prefix=name)
    trees = ocp.PyTreeCheckpointHandler(
        use_zarr3=True,
        use_compression=False,  # weights do not compress, and it takes longer than writing
        multiprocessing_options=together,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array | Pieces, _writer())),
    )
    ordered = ocp.options.AsyncOptions(create_directories_asynchronously=False)  # not beside the first writes
    options = ocp.CompositeOptions(multiprocessing_options=together, async_options=ordered)
    handler = ocp.CompositeCheckpointHandler(composite_options=options, **{_STATE: trees})
    return ocp.Checkpointer(handler, multiprocessing_options=together)


def _writer() -> Any:
    """Orbax's handler of arrays, for pieces of them."""
    from orbax.checkpoint import type_handlers

    class Writer(type_handlers.ArrayHandler):
        async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
            import tensorstore

            async with tensorstore.Transaction(atomic=True) as transaction:  # one index for all arrays
                await asyncio.gather(*(_write(x, info, transaction) for x, info in zip(values, infos, strict=True)))
            return []

    return Writer()


async def _write(x: Pieces, info: Any, transaction: Any) -> None:
    """Writes the pieces of one array; the first process, which has some of them or none, also writes its shape."""
    import tensorstore
    from orbax.checkpoint import type_handlers

    process = jax.process_index()
    spec = type_handlers.get_json_tspec_write(info, True, x.shape, x.chunk, x.dtype, process_index=process)
    opened = {"open": True, "context": info.ts_context, "transaction": transaction}
    if process == 0:
        await tensorstore.open(tensorstore.Spec(spec), create=True, **opened)
    array = await tensorstore.open(tensorstore.Spec(spec), assume_metadata=True, **opened)
    writes = (array[where].write(block, can_reference_source_data_indefinitely=True) for where, block in x.blocks())
    await asyncio.gather(*writes)


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
