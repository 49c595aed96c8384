"""Reading a tokenizer: its vocabulary, the token that ends a document, and files that are none."""

import json
import sys

import numpy as np
import pytest

from jaxshard import data
from tests.data.small_tokenizer import make_tokenizer


def test_a_folder_and_its_file_are_one_tokenizer(tmp_path):
    folder = make_tokenizer(tmp_path / "a")
    one, other = data.tokenizer(folder), data.tokenizer(folder / "tokenizer.json")
    assert (one.vocab, one.end, one.chat_template, one.digest) == (300, 1, None, other.digest)
    (ids,) = one.encode(["two and two \N{SNOWMAN}"])
    assert one.decode(ids) == "<s>two and two \N{SNOWMAN}" and one.text_of(1) == "</s>" and one.text_of(999) == ""
    ((same, spans),) = one.encode_with_spans(["two and two"])
    assert spans[0].tolist() == [0, 0] and spans[-1][1] == 11 and len(same) == len(spans)


def test_the_end_token_of_either_file_and_of_none(tmp_path):
    folder = make_tokenizer(tmp_path / "a", end={"content": "<|im_end|>"})
    assert data.tokenizer(folder).end == 3
    before = data.tokenizer(folder).digest
    (folder / "tokenizer_config.json").unlink()
    assert data.tokenizer(folder).end is None and data.tokenizer(folder).digest != before
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 999}))
    assert data.tokenizer(folder).end is None  # the tokenizer has 300
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert data.tokenizer(folder).end == 1
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    assert data.tokenizer(folder).end == 2
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert data.tokenizer(folder).end == 3


def test_no_token_is_lost_or_added_by_what_the_file_says(tmp_path):
    folder = make_tokenizer(tmp_path / "a")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(data.tokenizer(folder).encode(["the row of tokens is a row"])[0]) > 3


def test_chat_templates_are_found(tmp_path):
    """Of several files the first counts: chat_template.jinja, chat_template.json, tokenizer_config.json."""
    named = [{"name": "default", "template": "1"}, {"name": "tool_use", "template": "2"}]
    folder = make_tokenizer(tmp_path / "a", template=named)
    found = data.tokenizer(folder).chat_template
    assert found.file == folder / "tokenizer_config.json" and found.programs == {"default": "1", "tool_use": "2"}
    assert found.tokens == {"eos_token": "</s>"}
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "3"}))
    assert data.tokenizer(folder).chat_template.programs == {"default": "3"}
    (folder / "chat_template.jinja").write_text("4")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("5")
    found = data.tokenizer(folder).chat_template
    assert found.file == folder / "chat_template.jinja" and found.programs == {"default": "4", "rag": "5"}
    make_tokenizer(tmp_path / "b", template={"default": "1"})
    with pytest.raises(ValueError, match=r"tokenizer_config.json: chat_template must be text, or a list of"):
        data.tokenizer(tmp_path / "b")


def test_what_is_no_tokenizer(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json does not exist; give a tokenizer.json, or a folder"):
        data.tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(FileNotFoundError, match=r"the folder has tokenizer.model, an older form: transformers.Auto"):
        data.tokenizer(tmp_path)
    folder = make_tokenizer(tmp_path / "a", end="<none>")
    with pytest.raises(ValueError, match=r"names the eos_token '<none>', which tokenizer.json lacks"):
        data.tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is no JSON"):
        data.tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer that can be read"):
        data.tokenizer(folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[hf\]'"):
        data.tokenizer(folder)


def test_tokens_are_stored_in_as_few_bytes_as_the_vocabulary_needs(tmp_path):
    (tmp_path / "a.txt").write_text("the row of tokens is a row " * 20)
    corpus = data.tokenize(tmp_path / "a.txt", data.tokenizer(make_tokenizer(tmp_path / "a")), cache=tmp_path / "cache")
    assert corpus.train.tokens.dtype == np.uint16
