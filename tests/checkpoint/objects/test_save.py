"""Runs in an object store: restored bit for bit by other layouts; damage, faults and old listings are no loss."""

import asyncio
import os

import jax
import numpy as np
import pytest
import tensorstore

import jaxshard as js
from jaxshard.checkpoint import objects
from jaxshard.checkpoint.folder import step_folders
from jaxshard.checkpoint.loading import load_arrays
from jaxshard.checkpoint.manifest import MANIFEST
from jaxshard.checkpoint.reader import describe
from jaxshard.storage import bucket as storage_bucket
from jaxshard.storage.paths import as_path
from tests.checkpoint.runs import made
from tests.checkpoint.small import at, layout, new_run, placed
from tests.storage.faults import failing
from tests.storage.server import point_at, server


def assert_equal(run, expected):
    """The same numbers, bit for bit, in layouts that may pad arrays differently."""
    for a, b in zip(jax.tree.leaves(run), jax.tree.leaves(expected), strict=True):
        a, b = (jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b))
        common = tuple(slice(0, min(sizes)) for sizes in zip(a.shape, b.shape, strict=True))
        assert a.dtype == b.dtype and np.asarray(a)[common].tobytes() == np.asarray(b)[common].tobytes()


def copy_to_disk(address, folder):
    """Copy a folder of an object store to a disk, as a tool of the store would."""
    for name in as_path(address).files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((as_path(address) / name).read_bytes())


def copy_to_store(folder, address):
    for path in folder.rglob("*"):
        if path.is_file():
            (as_path(address) / path.relative_to(folder).as_posix()).write_bytes(path.read_bytes())


@pytest.mark.slow
def test_another_layout_restores_what_was_saved_and_damage_is_found(bucket, tmp_path):
    root = f"{bucket}/runs/a"
    assert js.latest_step(root) is None
    for number in (1, 2):
        assert str(js.save(root, at(number), layout(), data={"row": number})) == f"{root}/{number}"
    js.save(root, at(2), layout())  # it is there
    assert js.latest_step(root) == js.latest_step(root, intact=True) == 2
    assert describe(root, step=1).data == {"row": 1} and describe(root).size > 64 * 48 * 4
    for devices in (1, 2, 4):
        assert_equal(js.restore(root, layout(devices)), at(2))

    copy_to_disk(root, tmp_path / "a")  # and back
    assert_equal(js.restore(tmp_path / "a", layout(4)), at(2))
    js.save(tmp_path / "b", at(3), layout())
    copy_to_store(tmp_path / "b", f"{bucket}/b")
    assert_equal(js.restore(f"{bucket}/b", layout(4)), at(3))

    data = max(describe(root).files, key=lambda name: len(as_path(f"{root}/2/{name}").read_bytes()))
    content = as_path(f"{root}/2/{data}").read_bytes()
    as_path(f"{root}/2/{data}").write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    with pytest.raises(js.Damaged, match=rf"{root}/2/{data}: written again since the step was saved"):
        js.restore(root, layout())
    with pytest.raises(ValueError, match=r"its arrays can't be read: .*Digest mismatch"):
        js.restore(root, layout(), verify=False)
    copied = tmp_path / "a/2" / data
    copied.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    with pytest.raises(js.Damaged, match=r"arrays: .*Digest mismatch"):
        js.restore(tmp_path / "a", layout())
    as_path(f"{root}/2/{data}").unlink()
    with pytest.raises(js.Damaged, match=f"{data}: missing"):
        js.restore(root, layout(), verify=False)
    assert js.latest_step(root, intact=True) == 1
    js.save(root, at(2), layout())  # a damaged step is replaced
    assert_equal(js.restore(root, layout(1)), at(2))


@pytest.mark.slow
def test_a_checkpointer_keeps_the_newest_and_the_best(bucket):
    root = f"{bucket}/run"
    with js.Checkpointer(root, layout(), every=2, keep=2, best="loss") as checkpointer:
        for number in range(1, 8):
            checkpointer(number, at(number))
            checkpointer.evaluated(number, at(number), {"loss": abs(number - 3.0)})
    assert list(step_folders(as_path(root))) == [4, 6] and list(step_folders(as_path(f"{root}/best"))) == [3]
    assert_equal(js.restore(root, layout()), at(6))
    assert js.restore(f"{root}/best", layout()).step == 3
    with js.Checkpointer(root, layout(), every=1) as checkpointer:  # a new lease, a new epoch
        checkpointer(7, at(7))
    assert describe(root).epoch == 2 and describe(root, step=6).epoch == 1


@pytest.mark.slow
def test_what_is_no_folder_of_checkpoints_is_refused_in_one_line(bucket, monkeypatch):
    with pytest.raises(OSError, match=r"^s3://absent/run: NoSuchBucket: .*; create the bucket, or correct its name$"):
        js.save("s3://absent/run", at(1), layout())
    with pytest.raises(FileNotFoundError, match=rf"^{bucket}/none: there is no such folder of checkpoints$"):
        js.restore(f"{bucket}/none", layout())
    as_path(f"{bucket}/run/.lock").write_bytes(b"{}")
    with pytest.raises(OSError, match=rf"^{bucket}/run/.lock: this is not the lease of a folder of checkpoints"):
        js.save(f"{bucket}/run", at(1), layout())
    as_path(f"{bucket}/other/1/{MANIFEST}").write_bytes(b'{"format": 1}\ncrc32 00000000\n')
    with pytest.raises(ValueError, match="its checksum does not fit its bytes"):
        js.restore(f"{bucket}/other", layout())
    js.save(f"{bucket}/other", at(1), layout())
    assert_equal(js.restore(f"{bucket}/other", layout()), at(1))


FAULTS = {
    "errors": lambda request: "refused" if request.number % 5 == 1 else "",
    "lost answers": lambda request: "lost" if request.is_conditional and request.number % 2 else "",
    "slow": lambda request: "slow" if request.number % 7 == 3 else "",
    "old listings": lambda request: "stale" if "list-type=2" in request.path else "",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_faults_of_the_store_lose_nothing(kind, bucket, monkeypatch):
    root = f"{bucket}/run"
    with failing(os.environ["AWS_ENDPOINT_URL"], FAULTS[kind]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
        with js.Checkpointer(root, layout(), every=1, keep=2) as checkpointer:
            for number in range(1, 6):
                checkpointer(number, at(number))
        if kind != "old listings":
            assert js.latest_step(root) == 5
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        point_at(server(), patch)
        assert_equal(js.restore(root, layout(1)), at(5))
        kept = list(step_folders(as_path(root)))
        assert kept == [4, 5] or (kind == "old listings" and set(kept) >= {4, 5})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three", "pipeline", "zero1", "hsdp"])
def test_every_kind_of_layout(name, bucket):
    root = f"{bucket}/{name}"
    js.save(root, made(name).run(), made(name).layout)
    for other in ("fsdp", "tensor"):
        assert_equal(js.restore(root, made(other).layout), made(other).run())


@pytest.mark.slow
def test_dtypes(bucket):
    """Of less than a byte, of eight, and random keys."""
    dtypes = ["int4", "float8_e4m3fn", "bfloat16", "bool", "uint8", "complex64"]
    arrays = {name: np.arange(16).astype(jax.numpy.dtype(name)) for name in dtypes} | {"key": jax.random.key(3)}
    run, there = placed(lambda key: js.Model({"w": np.ones(4, np.float32)}, arrays), given=None)
    js.save(f"{bucket}/types", run, there)
    assert_equal(js.restore(f"{bucket}/types", there), run)


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_no_damage(bucket, monkeypatch):
    """A step that is there stays, and is not taken for another."""
    root, endpoint = f"{bucket}/run", os.environ["AWS_ENDPOINT_URL"]
    js.save(root, at(1), layout())
    monkeypatch.setattr(storage_bucket, "_RETRIES", {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"})
    for broken in ("/arrays-1/", f"/1/{MANIFEST}", "/state/manifest.ocdbt"):
        with failing(endpoint, lambda request, broken=broken: "refused" if broken in request.path else "") as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
            for ask in (lambda: js.save(root, at(1), layout()), lambda: js.latest_step(root, intact=True)):
                with pytest.raises(OSError, match="retry attempts failed"):
                    ask()
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert js.latest_step(root, intact=True) == 1
    assert_equal(js.restore(root, layout()), at(1))


def test_missing_chunks_are_no_zeros(tmp_path):
    js.save(tmp_path, at(0), layout())
    folder, (w,) = (
        tmp_path / "0" / "arrays",
        [x for path, x in jax.tree.leaves_with_path(at(0).params) if "w" in str(path)],
    )
    wanted = {"params/w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)}
    assert np.asarray(load_arrays(folder, wanted)["params/w"]).tobytes() == np.asarray(w).tobytes()
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/state/"}}
    database = tensorstore.KvStore.open(base).result()
    database.write(next(key for key in database.list().result() if key.startswith(b"params/w/c/0")), None).result()
    with pytest.raises(ValueError, match="NOT_FOUND"):
        load_arrays(folder, wanted)


@pytest.mark.slow
def test_zeros_are_stored_and_large_chunks_divided(bucket, monkeypatch):
    monkeypatch.setattr(objects, "_OBJECT_SIZE", 1 << 10)
    assert objects._divide_chunk((6, 100), 4) == [2, 100] and objects._divide_chunk((4, 700), 8) == [1, 100]
    js.save(f"{bucket}/run", at(0), layout())
    assert_equal(js.restore(f"{bucket}/run", layout(4)), at(0))


@pytest.mark.slow
def test_it_saves_while_an_event_loop_runs(bucket):
    async def cell():
        return js.save(f"{bucket}/run", at(1), layout())

    asyncio.run(cell())
    assert js.latest_step(f"{bucket}/run") == 1


def test_a_run_is_saved_again_after_it_was_donated(bucket):
    root, run = f"{bucket}/run", new_run(1)
    with js.Checkpointer(root, layout(), every=1) as checkpointer:
        checkpointer(1, run)
        for leaf in jax.tree.leaves(run):
            leaf.delete()
    assert_equal(js.restore(root, layout()), at(1))
