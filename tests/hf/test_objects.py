"""Models of Hugging Face at an address of an object store."""

import jax
import numpy as np
import pytest

import jaxshard as js
from jaxshard.storage.paths import as_path
from tests.data.small_tokenizer import make_tokenizer
from tests.hf.checkpoints import write_folder
from tests.hf.test_families import LAYOUTS, TX, load

pytestmark = pytest.mark.slow


def upload(folder, address):
    for file in folder.rglob("*"):
        if file.is_file():
            (as_path(address) / file.relative_to(folder).as_posix()).write_bytes(file.read_bytes())
    return address


def test_a_model_is_loaded_and_saved_as_in_a_folder(bucket, tmp_path):
    folder = write_folder(make_tokenizer(tmp_path / "model"), "llama")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    (folder / "merges.txt").write_text("merges")
    address = upload(folder, f"{bucket}/model")
    _, _, expected = load(folder, *LAYOUTS["tensor"])
    model, layout, params = load(address, *LAYOUTS["tensor"])
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    run = js.init(model.init, TX, layout, 0, init_from=params)
    saved = js.hf.save(f"{bucket}/saved", run, layout, max_bytes=20_000)
    js.hf.save(tmp_path / "saved", run, layout, max_bytes=20_000)
    there = {name: (saved / name).read_bytes() for name in saved.files()}
    local = tmp_path / "saved"
    assert there == {f.relative_to(local).as_posix(): f.read_bytes() for f in local.rglob("*") if f.is_file()}
    assert {"merges.txt", "tokenizer.json", "additional_chat_templates/rag.jinja"} <= there.keys()
    jax.tree.map(np.testing.assert_array_equal, js.hf.load(saved, layout), expected)
    with pytest.raises(FileExistsError, match=f"^{bucket}/saved/config.json is there already"):
        js.hf.save(saved, run, layout)
    for absent in (f"{bucket}/absent", f"{bucket}/saved/config.json"):
        with pytest.raises(FileNotFoundError, match=f"{absent} has no config.json"):
            js.hf.model(absent)


def test_a_tokenizer_is_read_with_the_files_next_to_it(bucket, tmp_path):
    local = js.data.tokenizer(make_tokenizer(tmp_path / "words"))
    address = upload(tmp_path / "words", f"{bucket}/words")
    for where in (address, f"{address}/tokenizer.json"):
        found = js.data.tokenizer(where)
        assert (found.digest, found.end, found.vocab) == (local.digest, local.end, local.vocab)
    with pytest.raises(FileNotFoundError, match=f"{bucket}/absent: there is no such object"):
        js.data.tokenizer(f"{bucket}/absent")
