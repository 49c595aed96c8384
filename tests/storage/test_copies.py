"""Reading objects in ranges, and copies of them in the cache of this machine."""

import multiprocessing
import os

import pytest

from jaxshard.storage import copies
from jaxshard.storage.copies import ends_at, local_copy, read_range
from jaxshard.storage.paths import as_path

pytestmark = pytest.mark.slow


def test_a_range_ends_where_the_object_ends(bucket):
    file, empty = as_path(f"{bucket}/file"), as_path(f"{bucket}/empty")
    file.write_bytes(b"0123456789")
    empty.write_bytes(b"")
    ranges = [(0, 4), (0, 10), (4, 20), (9, 11), (10, 20), (11, 12)]
    assert [read_range(file, *one).content for one in ranges] == [b"0123", b"0123456789", b"456789", b"9", b"", b""]
    assert read_range(empty, 0, 8).content == b""
    assert [size for size in range(13) if ends_at(file, size)] == [10]
    with pytest.raises(FileNotFoundError, match=f"^{bucket}/absent: there is no such object$"):
        read_range(as_path(f"{bucket}/absent"), 0, 8)


@pytest.mark.parametrize("size", [0, 9, 10, 21])
def test_a_copy_is_made_in_ranges_once_and_again_after_a_change(size, bucket, monkeypatch):
    monkeypatch.setattr(copies, "CHUNK", 10)
    file, content = as_path(f"{bucket}/folder/text.txt"), bytes(range(size))
    file.write_bytes(content)
    copy = local_copy(file)
    assert copy.read_bytes() == content and copy.name == "text.txt"
    with monkeypatch.context() as patch:
        patch.setattr(copies, "_copy", None)  # the second time nothing is copied
        assert local_copy(file) == copy
    file.write_bytes(content + b"!")
    assert local_copy(file).read_bytes() == content + b"!"


def test_an_object_that_changes_while_it_is_read_is_no_copy(bucket, monkeypatch):
    monkeypatch.setattr(copies, "CHUNK", 4)
    file = as_path(f"{bucket}/text.txt")
    file.write_bytes(b"old old old")
    read = copies.read_range

    def change(source, start, end):
        if start:
            file.write_bytes(b"new new new")
        return read(source, start, end)

    monkeypatch.setattr(copies, "read_range", change)
    with pytest.raises(OSError, match=f"^{file}: it was changed while it was read; read it again"):
        local_copy(file)
    assert local_copy(file).read_bytes() == b"new new new"


def test_folders_are_copied_with_their_folders_and_only_what_is_asked_for(bucket):
    folder = as_path(f"{bucket}/texts")
    for name in ("a.json", "b/c.json", "d/e.json", "big.safetensors"):
        (folder / name).write_bytes(name.encode())
    copy = local_copy(folder, ("*.json", "b/*"))
    found = {path.relative_to(copy).as_posix(): path.read_text() for path in copy.rglob("*") if path.is_file()}
    assert found == {name: name for name in ("a.json", "b/c.json")}
    assert (local_copy(folder) / "big.safetensors").exists()
    assert (local_copy(as_path(bucket)) / "texts" / "a.json").read_text() == "a.json"


def test_nothing_and_names_outside_of_the_folder_are_refused(bucket, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=f"^{bucket}/absent: there is no such object, and none in a folder"):
        local_copy(as_path(f"{bucket}/absent"))
    assert local_copy(tmp_path / "absent") == tmp_path / "absent"
    monkeypatch.setattr(copies.ObjectPath, "files", lambda self: ["a", "../x"])  # the local server refuses such names
    with pytest.raises(OSError, match=r"/up/../x: files can't have this name; rename the object"):
        local_copy(as_path(f"{bucket}/up"))


def _copy(address, cache, found):
    os.environ["XDG_CACHE_HOME"] = cache
    found.put(local_copy(as_path(address)).read_bytes())


def test_several_processes_copy_once(bucket, tmp_path):
    as_path(f"{bucket}/text.txt").write_bytes(b"text" * 1000)
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    started = [context.Process(target=_copy, args=(f"{bucket}/text.txt", str(tmp_path), found)) for _ in range(3)]
    for process in started:
        process.start()
    assert {found.get(timeout=120) for _ in started} == {b"text" * 1000}
    for process in started:
        process.join()
    assert len([path for path in (tmp_path / "jaxshard" / "objects").iterdir() if path.is_dir()]) == 1
