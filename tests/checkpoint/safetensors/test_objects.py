"""Models as objects: they are saved and loaded as in files, and each process reads the ranges that it needs."""

import jax
import numpy as np
import pytest

import jaxshard as js
from jaxshard.checkpoint.safetensors import parts, writer
from jaxshard.storage.paths import ObjectPath, as_path
from tests.checkpoint.small import TX, init_fn, layout, start

pytestmark = pytest.mark.slow


def same(loaded, run):
    again = js.init(init_fn, TX, layout(), 1, init_from=loaded)
    assert js.to_bytes(again, layout()) == js.to_bytes(run, layout())


@pytest.mark.parametrize("max_bytes", [1 << 30, 3000], ids=["one", "many"])
def test_a_model_is_the_same_as_on_disk(max_bytes, bucket, tmp_path):
    run = start()
    address = f"{bucket}/run/model.safetensors"
    path = js.save_safetensors(address, run, layout(), max_bytes=max_bytes)
    assert str(path) == address
    js.save_safetensors(tmp_path / "model.safetensors", run, layout(), max_bytes=max_bytes)
    there = {name: (path.parent / name).read_bytes() for name in path.parent.files()}
    assert there == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    same(js.load_safetensors(address, layout()), run)
    with pytest.raises(FileExistsError, match=r"model.safetensors.* is there already; .* overwrite=True"):
        js.save_safetensors(path, run, layout())
    js.save_safetensors(path, run, layout(), overwrite=True)
    assert path.parent.files() == ["model.safetensors"]
    same(js.load_safetensors(path, layout()), run)


def test_a_process_reads_ranges_for_its_devices(bucket, monkeypatch):
    """Two of eight devices: an eighth of the matrix each, in a range of its own."""
    made = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=8), lambda key: {"w": jax.numpy.ones((1024, 4096))})
    run = js.init(lambda key: {"w": jax.random.normal(key, (1024, 4096))}, None, made, 0)
    path = js.save_safetensors(f"{bucket}/m.safetensors", run, made)
    read, ranges = parts.read_range, []

    def note(file, start, end):
        ranges.append(end - start)
        return read(file, start, end)

    monkeypatch.setattr(parts, "read_range", note)
    loaded = js.load_safetensors(path, made, verify=False)
    assert ranges == 8 * [1024 * 4096 * 4 // 8]
    np.testing.assert_array_equal(loaded["w"], run.params["w"])


def test_damage_is_found(bucket):
    path = js.save_safetensors(f"{bucket}/m.safetensors", start(), layout())
    content = path.read_bytes()

    def refused(content, match, **options):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=match):
            js.load_safetensors(path, layout(), **options)

    refused(content[:-1], "it was cut off, or more was added")
    refused(content + b"!", "it was cut off, or more was added")
    refused(content[:7], "7 bytes are no safetensors file")
    refused(b"", "0 bytes are no safetensors file")
    refused(content[:-9] + b"!" + content[-8:], r"is damaged\n.*its bytes are not those that were saved")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"^{path}: no model is here"):
        js.load_safetensors(path, layout())


def test_a_failure_leaves_nothing_new_and_keeps_the_old_model(bucket, monkeypatch):
    path = js.save_safetensors(f"{bucket}/old/m.safetensors", start(), layout())
    old = path.read_bytes()
    write, count = ObjectPath.write_bytes, []

    def fail_at(number):
        def fail(self, content):
            count.append(self)
            if len(count) == number:
                raise ConnectionError(f"{self}: no answer")
            write(self, content)

        count.clear()
        monkeypatch.setattr(ObjectPath, "write_bytes", fail)

    fail_at(1)
    with pytest.raises(OSError, match=r"could not be written, and nothing of it is left: .*no answer"):
        js.save_safetensors(path, start(), layout(), overwrite=True)
    assert path.read_bytes() == old
    for number in (2, 5):  # a file, the index
        fail_at(number)
        with pytest.raises(OSError, match=r"could not be written, and nothing of it is left: .*no answer"):
            js.save_safetensors(f"{bucket}/new/m.safetensors", start(), layout(), max_bytes=3000)
        assert not as_path(f"{bucket}/new").exists()


def test_files_at_an_address_are_smaller(bucket, monkeypatch):
    monkeypatch.setattr(writer, "_MAX_OBJECT", 3000)
    path = js.save_safetensors(f"{bucket}/m.safetensors", start(), layout())
    assert "m.safetensors.index.json" in path.parent.files()
    same(js.load_safetensors(path, layout()), start())
