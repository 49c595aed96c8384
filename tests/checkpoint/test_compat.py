"""Private and undocumented names of Orbax and TensorStore: each test bears the name of what it would miss."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxshard.checkpoint import compat, store
from jaxshard.checkpoint.loading import load_arrays
from jaxshard.checkpoint.os_errors import os_error
from jaxshard.checkpoint.snapshot import HostBlocks
from jaxshard.core.placement import View

NUMBERS = np.random.default_rng(0)
ARRAYS = {f"array {i}": NUMBERS.normal(size=(40, 30 + i)).astype(np.float32) for i in range(12)}
ARRAYS |= {"a/%2F": np.arange(64 * 64, dtype=np.float32).reshape(64, 64)}


def blocks_of(x):
    """All of an array with an even number of rows, in two chunks."""
    half = len(x) // 2
    shards = tuple(((rows, slice(0, x.shape[1])), x[rows]) for rows in (slice(0, half), slice(half, len(x))))
    return HostBlocks(x.shape, x.dtype, (half, x.shape[1]), View(x.shape, x.shape, x.shape), shards)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    store.save_arrays(folder / "arrays", {name: blocks_of(x) for name, x in ARRAYS.items()}, "one")
    return folder


def test_array_handler_serialize_is_what_orbax_calls(tmp_path, monkeypatch):
    """Once for all arrays, with our blocks as they are; what it writes Orbax restores."""
    called, serialize = [], compat.BlocksHandler.serialize

    async def spy(self, values, infos, args=None):
        called.append([value.shape for value in values])
        return await serialize(self, values, infos, args)

    monkeypatch.setattr(compat.BlocksHandler, "serialize", spy)
    store.save_arrays(tmp_path / "arrays", {name: blocks_of(x) for name, x in ARRAYS.items()}, "spied")
    assert sorted(*called) == sorted(x.shape for x in ARRAYS.values())
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), P())
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in ARRAYS.items()}
    loaded = load_arrays(tmp_path / "arrays", shapes)
    assert {name: np.asarray(x).tobytes() for name, x in loaded.items()} == {
        name: x.tobytes() for name, x in ARRAYS.items()
    }


def test_ocdbt_dump_says_where_every_array_lies(saved):
    """Silent otherwise: damaged files would be found, but the arrays in them not named."""
    names = list(ARRAYS)
    found = store.find_extents(saved / "arrays", {name: number for number, name in enumerate(names)})
    there: dict[int, bytes] = {}
    for file, extents in found.items():
        raw = (saved / file).read_bytes()
        for extent in sorted(extents):
            there[extent.array] = there.get(extent.array, b"") + raw[extent.start : extent.start + extent.size]
    for number, name in enumerate(names):
        x = ARRAYS[name]
        halves = x[: len(x) // 2].tobytes(), x[len(x) // 2 :].tobytes()
        assert all(half in there[number] for half in halves), name
        assert len(there[number]) < x.nbytes + 4096, "besides the chunks, their index and the array's metadata"


def test_os_error_code_is_the_errno_of_a_failed_write(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store_ = compat.tensorstore.KvStore.open({"driver": "file", "path": f"{tmp_path}/file/"}).result()
    with pytest.raises(Exception, match="Not a directory") as caught:
        store_.write(b"key", b"value").result()
    assert isinstance(os_error("it failed", caught.value), NotADirectoryError)
    assert str(os_error("it failed", caught.value)) == "it failed" and os_error("", KeyError("1")).errno is None


def test_use_compression_false_leaves_plain_bytes(saved):
    """Silent otherwise: saves would get slower."""
    raw = b"".join(path.read_bytes() for path in saved.rglob("*") if path.is_file())
    for name, x in ARRAYS.items():
        assert x[: len(x) // 2].tobytes() in raw, name


def test_ocdbt_keeps_arrays_in_few_files(saved, tmp_path):
    """Silent otherwise: there would be a file for every chunk of every array."""
    store.save_arrays(tmp_path / "arrays", {"one": blocks_of(ARRAYS["array 0"])}, "alone")
    counts = [sum(path.is_file() for path in folder.rglob("*")) for folder in (saved, tmp_path)]
    assert abs(counts[0] - counts[1]) <= 2 < len(ARRAYS), counts


def test_zarr_json_says_shape_and_dtype_of_every_array(saved):
    assert store.find_arrays(saved / "arrays") == {name: (x.shape, str(x.dtype)) for name, x in ARRAYS.items()}
