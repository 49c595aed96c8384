"""Full and read-only disks while a model is written: an error that says so, and not a file besides those before."""

import errno
import os

import jax.numpy as jnp
import pytest

import jaxshard as js
from jaxshard.checkpoint.safetensors import writer
from tests.checkpoint.small import placed
from tests.small_disk import small_disk

PAGE = 4096


@pytest.fixture(scope="module")
def made():
    """A model of three tensors, 12 pages together."""
    model = {name: jnp.arange(4.0 * 1024) + number for number, name in enumerate("abc")}
    return placed(lambda key: model, None, js.fsdp("data"))


@pytest.mark.parametrize("max_bytes", [1 << 20, 4 * PAGE], ids=["one", "many"])
def test_a_disk_that_fills_up_at_any_page(max_bytes, made, tmp_path):
    run, layout = made
    with small_disk(tmp_path / "disk", 64 * PAGE) as disk:
        disk.folder.mkdir()
        outcomes = []
        for pages in range(24):
            disk.leave(pages * PAGE)
            path = disk.folder / "model.safetensors"
            try:
                js.save_safetensors(path, run, layout, max_bytes=max_bytes)
                outcomes.append(True)
            except OSError as error:
                assert f"{path}: the model could not be written" in str(error) and "No space left on device" in str(
                    error
                )
                outcomes.append(False)
            there = list(disk.folder.iterdir())
            assert len(there) == (0 if not outcomes[-1] else 1 if max_bytes > 12 * PAGE else 4)
            if outcomes[-1]:
                assert js.to_bytes(js.load_safetensors(path, layout), layout) == js.to_bytes(run, layout)
            for file in there:
                file.unlink()
        assert outcomes == sorted(outcomes) and outcomes.count(False) >= 12 and any(outcomes)


def test_a_read_only_disk(made, tmp_path):
    run, layout = made
    with small_disk(tmp_path / "disk", 64 * PAGE) as disk:
        path = js.save_safetensors(disk.folder / "a.safetensors", run, layout)
        with disk.read_only():
            for name in ("run/b.safetensors", "new/b.safetensors"):
                with pytest.raises(OSError, match=r"b.safetensors: the model could not be .*Read-only file system"):
                    js.save_safetensors(tmp_path / "disk" / name, run, layout)
            assert float(js.load_safetensors(path, layout)["c"][0]) == 2


@pytest.mark.parametrize("place", ["flush", "rename", "index"])
def test_faults_at_the_end(place, made, tmp_path, monkeypatch):
    """Complete drafts are no files yet, and neither are those with their names before the index is there."""
    run, layout = made
    count, rename = [], writer.Path.rename

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def second(*args):
        count.append(args)
        return full() if len(count) == 2 else rename(*args)

    target, name, fault = {
        "flush": (writer.os, "fsync", full),
        "rename": (writer.Path, "rename", second),
        "index": (writer, "write_atomically", full),
    }[place]
    monkeypatch.setattr(target, name, fault)
    with pytest.raises(OSError, match=r"and nothing of it is left: .*No space left on device"):
        js.save_safetensors(tmp_path / "m.safetensors", run, layout, max_bytes=4 * PAGE)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    js.save_safetensors(tmp_path / "m.safetensors", run, layout, max_bytes=4 * PAGE)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_named_pipe_is_not_opened(name, made, tmp_path):
    """Opening it would wait for a writer."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: not a plain file"):
        js.load_safetensors(tmp_path / "model.safetensors", made[1])
