from jaxshard.storage.paths import as_path


def test_objects_are_written_read_listed_and_deleted(bucket):
    folder = as_path(f"{bucket}/run")
    (folder / "a/b").write_bytes(b"text")
    (folder / "c").write_bytes(b"")
    assert folder.files() == ["a/b", "c"]
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c"]
    assert (folder / "a/b").read(1, 3).content == b"ex"
    assert (folder / "c").is_file() and not (folder / "c").is_dir() and (folder / "a").is_dir()
    (folder / "c").unlink()
    assert not (folder / "c").exists()
    folder.rmtree()
    assert not folder.exists()
