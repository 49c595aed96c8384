"""Corpora: the standard library, files, folders, token arrays."""

import io
import sys
import warnings

import numpy as np
import pytest

from jaxshard import data
from jaxshard.data import corpus as module

TOKENS = (np.arange(1000) * 7 % 251).astype(np.uint8)


def test_the_standard_library():
    corpus = data.stdlib()
    assert corpus.name == f"stdlib-{sys.version_info.major}.{sys.version_info.minor}"
    assert corpus.vocab == 256 and corpus.train.dtype == np.uint8
    assert len(corpus.train) > 4_000_000
    assert 0.03 < len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) < 0.12
    assert len(corpus.digest) == 64
    text = corpus.train.tobytes() + corpus.held_out.tobytes()
    assert b"class Thread:" in text and b"class TestThread" not in text


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_a_folder_is_split_by_the_hash_of_paths(tmp_path):
    files = {f"part{i % 3}/file{i}.txt": f"text {i} ".encode() * 3 for i in range(60)} | {
        ".git/config": b"hidden",
        "empty": b"",
    }
    corpus = data.load(write(tmp_path / "one", files))
    moved = data.load(write(tmp_path / "two", dict(reversed(files.items()))))
    assert corpus.digest == moved.digest
    np.testing.assert_array_equal(corpus.train, moved.train)
    texts = corpus.train.tobytes().split(b"\0") + corpus.held_out.tobytes().split(b"\0")
    assert sorted(filter(None, texts)) == sorted(
        content for name, content in files.items() if content and name[0] != "."
    )
    held = set(corpus.held_out.tobytes().split(b"\0"))
    assert 1 < len(held) < 15
    # A file that comes or goes moves no other file across the split.
    files.pop(next(name for name, content in files.items() if content in held))
    fewer = data.load(write(tmp_path / "three", files))
    assert set(fewer.held_out.tobytes().split(b"\0")) < held
    assert fewer.digest != corpus.digest


def test_one_file_is_split_at_its_end(tmp_path):
    path = write(tmp_path, {"a.txt": bytes(range(100))}) / "a.txt"
    for corpus in (data.load(path), data.load(str(path)), data.load(tmp_path)):
        np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.held_out]), np.arange(100))
        assert len(corpus.held_out) == 8


def test_files_that_are_not_text_are_named(tmp_path):
    write(tmp_path, {"a.txt": b"abc", "b.txt": b"def", "c.bin": b"\xff\xfe\x00"})
    with pytest.warns(UserWarning, match="left out 1 files that are not UTF-8, such as c.bin"):
        corpus = data.load(tmp_path)
    assert len(corpus.train) + len(corpus.held_out) == 8


def test_token_arrays_are_memory_mapped(tmp_path):
    tokens = np.arange(200, dtype=np.uint16) % 50
    np.save(tmp_path / "a.npy", tokens)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    (tmp_path / "b.npy").write_bytes(b"")
    npy, raw = data.load(tmp_path / "a.npy", vocab=50), data.load(tmp_path / "a.bin", vocab=50, dtype="uint16")
    assert npy.digest == raw.digest and npy.vocab == 50
    for corpus in (npy, raw):
        assert isinstance(corpus.train, np.memmap)
        np.testing.assert_array_equal(corpus.train, tokens[:184])
        np.testing.assert_array_equal(corpus.held_out, tokens[184:])
    np.save(tmp_path / "bytes.npy", TOKENS)
    assert data.load(tmp_path / "bytes.npy").vocab == 256


# Bad input.


def test_missing_data(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        data.load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["a.txt", "a.npy", "a.bin"])
def test_an_empty_file(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"{name} is empty"):
        data.load(tmp_path / name, **({"dtype": "uint8", "vocab": 256} if name == "a.bin" else {}))


def test_a_folder_without_text(tmp_path):
    write(tmp_path, {"a": b"", "b": b"\xff"})
    with pytest.raises(ValueError, match="has no text: 1 empty files, 1 not UTF-8"):
        data.load(tmp_path)


def test_ids_outside_the_vocabulary(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, 50, 3], np.uint16))
    with pytest.raises(ValueError, match=r"token id 50 is outside the vocabulary of 50 \(0 to 49\)"):
        data.load(tmp_path / "a.npy", vocab=50)
    source = data.windows(np.array([1, -2, 0, 3]), batch=1, seq=3, seed=0, vocab=50)
    with pytest.raises(ValueError, match="token id -2 is outside"):
        source.rows(0, np.arange(1))


def test_what_a_token_file_needs(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(9, np.uint16))
    np.save(tmp_path / "matrix.npy", np.zeros((3, 3), np.uint16))
    (tmp_path / "a.bin").write_bytes(b"12345")
    (tmp_path / "a.txt").write_bytes(b"12345")
    for match, name, options in [
        ("is unknown; give the size of its vocabulary", "a.npy", {}),
        ("holds uint16, but the dtype int32 was given", "a.npy", {"dtype": "int32"}),
        (r"one-dimensional integer array, got uint16\(3, 3\)", "matrix.npy", {"vocab": 5}),
        ("its dtype must be given", "a.bin", {"vocab": 5}),
        ("5 bytes, no multiple of the 2 bytes of uint16", "a.bin", {"vocab": 5, "dtype": "uint16"}),
        ("is unknown; give the size of its vocabulary", "a.bin", {"dtype": "int8"}),
        ("it came with the dtype uint16 and the vocabulary 5; they are for", "a.txt", {"vocab": 5, "dtype": "uint16"}),
    ]:
        with pytest.raises(ValueError, match=match):
            data.load(tmp_path / name, **options)


def test_a_file_that_is_no_text_is_read_as_bytes_with_a_warning(tmp_path):
    (tmp_path / "text").write_bytes(b"a" + "é".encode() * 40_000)  # what is looked at ends within a character
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corpus = data.load(tmp_path / "text")
    assert len(corpus.train) + len(corpus.held_out) == 80_001
    (tmp_path / "program").write_bytes(b"\x7fELF\xff\xfe" * 100)
    with pytest.warns(UserWarning, match="program is not UTF-8; its bytes are the tokens"):
        assert data.load(tmp_path / "program").vocab == 256


def test_a_python_without_library_source(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="has no library source"):
        data.stdlib()


def npy(**changes):
    """The bytes of a .npy file, with words of its header replaced."""
    content = io.BytesIO()
    np.save(content, TOKENS)
    text = content.getvalue()
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (npy()[:40], "EOF"),
        (npy(shape=(b"(1000,)", b"(1000,(")), "is no .npy file that can be read: "),
        (npy(shape=(b"(1000,), }", b"(9" + b"9" * 30 + b",)}")), "is no .npy file that can be read: "),
        (npy(dtype=(b"|u1", b"|O ")), "is no .npy file that can be read: "),
        (b"PK\x03\x04 no archive", "is an archive"),
        (None, "is an archive, such as .npz; save the tokens alone, with np.save"),
    ],
)
def test_a_file_that_is_no_npy_is_refused(content, message, tmp_path):
    if content is None:
        np.savez(tmp_path / "tokens.npz", tokens=TOKENS)
        content = (tmp_path / "tokens.npz").read_bytes()
    (tmp_path / "tokens.npy").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        data.load(tmp_path / "tokens.npy")
    assert str(error.value).startswith(f"data: {tmp_path / 'tokens.npy'} is ") and "\n" not in str(error.value)
