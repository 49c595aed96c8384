"""Data at an address of an object store: the same corpus as from files."""

import json

import numpy as np
import pytest

import jaxshard as js
from jaxshard.storage.paths import as_path
from tests.data.small_tokenizer import LINES, make_tokenizer

pytestmark = pytest.mark.slow


def both(bucket, folder, name, content):
    """Write a file and an object; return the path and the address."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    as_path(f"{bucket}/{folder.name}/{name}").write_bytes(content)
    return folder / name, f"{bucket}/{folder.name}/{name}"


def same(one, other):
    assert (one.name, one.digest, one.vocab) == (other.name, other.digest, other.vocab)


def test_tokens_text_and_folders(bucket, tmp_path):
    file, address = both(bucket, tmp_path, "ids.bin", np.arange(500, dtype=np.uint16).tobytes())
    found = js.data.load(address, dtype="uint16", vocab=500)
    same(found, js.data.load(file, dtype="uint16", vocab=500))
    assert isinstance(found.train, np.memmap)
    for name in ("texts/a.txt", "texts/b/c.txt", "texts/.hidden"):
        file, address = both(bucket, tmp_path, name, name.encode() * 9)
    same(js.data.load(f"{bucket}/{tmp_path.name}/texts"), js.data.load(tmp_path / "texts"))
    with pytest.raises(FileNotFoundError, match=f"^{bucket}/absent: there is no such object"):
        js.data.load(f"{bucket}/absent")


def test_documents(bucket, tmp_path):
    tokenizer = js.data.tokenizer(make_tokenizer(tmp_path / "words"))
    records = "".join(json.dumps({"text": line}) + "\n" for line in 5 * LINES)
    file, address = both(bucket, tmp_path, "records.jsonl", records.encode())
    same(js.data.tokenize(address, tokenizer), js.data.tokenize(file, tokenizer, cache=tmp_path / "cache"))
