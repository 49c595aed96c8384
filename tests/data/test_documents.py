"""Text and records to tokens: what is learned, what is held out, what is kept in the cache and what is refused."""

import json

import numpy as np
import pytest

from jaxshard import data
from tests.data.small_tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return data.tokenizer(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxshard" / "tokens"


def write(path, *records):
    path.write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in records))
    return path


def talk(*contents):
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


def texts_of(docs, tokenizer, number=0):
    """The text of a document, and that of its learned tokens."""
    one = docs.part(number, number + 1)
    return tokenizer.decode(one.tokens), None if one.answers is None else tokenizer.decode(one.tokens[one.answers])


def test_completions_are_learned_with_the_end_token(tokenizer, tmp_path):
    file = write(
        tmp_path / "a.jsonl", *({"prompt": f"{i} and one is", "completion": f" {i + 1}", "id": i} for i in range(30))
    )
    corpus = data.tokenize(file, tokenizer)
    assert (corpus.name, corpus.vocab, len(corpus.train), len(corpus.held_out)) == ("a.jsonl", 300, 28, 2)
    assert texts_of(corpus.train, tokenizer, 3) == ("<s>3 and one is 4</s>", " 4</s>")
    assert texts_of(corpus.held_out, tokenizer) == ("<s>28 and one is 29</s>", " 29</s>")
    assert corpus.held_out.where(0) == "a.jsonl line 29"


def test_what_the_assistant_says_is_learned(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", talk("two and two?", "four.", "why?", "it is."), "\n", talk("a", "b"))
    corpus = data.tokenize(file, tokenizer)
    shown = "<s>user:\ntwo and two?\nassistant:\nfour.\nuser:\nwhy?\nassistant:\nit is.\n</s>"
    assert texts_of(corpus.train, tokenizer) == (shown, "four.\nit is.\n</s>")
    assert corpus.held_out.lines.tolist() == [3]


def test_a_template_of_the_users_own_that_ends_a_document_by_itself(tokenizer, tmp_path):
    folder = make_tokenizer(tmp_path / "chat", end="<|im_end|>", begin=None, template="{% not used %}")
    file = write(tmp_path / "a.jsonl", talk("why?", "so."), talk("a", "b"))
    template = "<|im_start|>{role}\n{content}<|im_end|>\n"
    corpus = data.tokenize(file, data.tokenizer(folder), template=template)
    shown = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso.<|im_end|>\n"
    assert texts_of(corpus.train, data.tokenizer(folder)) == (shown, "so.<|im_end|>\n")
    with pytest.raises(ValueError, match=r"say \{content\} once"):
        data.tokenize(file, tokenizer, template="{role}")


def test_text_is_learned_whole(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", {"text": "one row"}, {"text": ""}, {"text": "two rows"}, {"text": "three"})
    with pytest.warns(UserWarning, match=r"a.jsonl: left out 1 empty document"):
        corpus = data.tokenize(file, tokenizer)
    assert [texts_of(part, tokenizer)[0] for part in (corpus.train, corpus.held_out)] == [
        "<s>one row</s>",
        "<s>three</s>",
    ]
    assert corpus.train.answers is None and len(corpus.train) == 2


def test_files_of_a_folder_are_documents_and_one_file_is_cut(tokenizer, tmp_path):
    for number in range(5):
        (tmp_path / "texts" / str(number)).mkdir(parents=True)
        (tmp_path / "texts" / str(number) / "a.txt").write_text(f"row {number}")
    (tmp_path / "texts" / "empty.txt").write_text("")
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.warns(UserWarning, match=r"left out 1 files that are not UTF-8, such as picture.png"):
        corpus = data.tokenize(tmp_path / "texts", tokenizer)
    found = [texts_of(part, tokenizer, i)[0] for part in corpus[1:3] for i in range(len(part))]
    assert sorted(found) == [f"<s>row {number}</s>" for number in range(5)]
    # Held out are the files that `load` holds out.
    with pytest.warns(UserWarning, match="left out"):
        held = bytes(data.load(tmp_path / "texts").held_out).decode().split("\0")[:-1]
    assert [f"<s>{text}</s>" for text in held] == found[-len(corpus.held_out) :]
    (tmp_path / "a.txt").write_text("the row of tokens is a row " * 20)
    corpus = data.tokenize(tmp_path / "a.txt", tokenizer)
    count = len(corpus.train.tokens) + len(corpus.held_out.tokens)
    assert len(corpus.train) == len(corpus.held_out) == 1 and len(corpus.held_out.tokens) == int(0.08 * count)


def test_tokens_come_from_the_cache_and_are_made_again_where_it_is_damaged(
    folder, tokenizer, tmp_path, cache, monkeypatch
):
    file = write(tmp_path / "a.jsonl", talk("why?", "so."), talk("a", "b"), talk("c", "d"))
    made = data.tokenize(file, tokenizer)
    (kept,) = cache.iterdir()
    assert kept.name.startswith("a.jsonl-") and not isinstance(made.train.tokens, np.memmap)
    again = data.tokenize(file, data.tokenizer(folder))
    assert isinstance(again.train.tokens, np.memmap) and again.digest == made.digest
    for name in ("tokens", "starts", "answers", "lines"):
        np.testing.assert_array_equal(getattr(again.train, name), getattr(made.train, name))
    del again
    content = (kept / "tokens.npy").read_bytes()
    (kept / "tokens.npy").write_bytes(content[:-2] + b"\7\0")
    assert data.tokenize(file, tokenizer).digest == made.digest
    assert (kept / "tokens.npy").read_bytes() == content
    # Another template, another tokenizer or another line are other tokens.
    data.tokenize(file, tokenizer, template="{content}")
    data.tokenize(file, data.tokenizer(make_tokenizer(tmp_path / "other", end="<|im_end|>")))
    write(file, talk("why?", "so!"), talk("a", "b"))
    data.tokenize(file, tokenizer)
    assert len(list(cache.iterdir())) == 4 and not list(cache.glob(".*"))
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the tokens of a.jsonl are not kept: "):
        data.tokenize(file, tokenizer, cache=tmp_path / "file")


def test_a_tokenizer_without_an_end_of_text_is_told(folder, tmp_path):
    """Where the end is needed: not for conversations that a chat template writes."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "a.txt").write_text("the row of tokens is a row " * 20)
    with pytest.warns(UserWarning, match=r"tokenizer.json names no token that ends a text: give tokenizer_config.json"):
        data.tokenize(tmp_path / "a.txt", data.tokenizer(tmp_path))


def test_an_answer_inside_a_token_is_told(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", {"prompt": "two and ", "completion": "two"}, {"prompt": "a", "completion": " b"})
    with pytest.warns(UserWarning, match=r"a.jsonl: 1 answer\(s\) begin inside a token"):
        corpus = data.tokenize(file, tokenizer)
    assert texts_of(corpus.train, tokenizer)[1] == " two</s>"


GOOD = {"prompt": "a", "completion": "b"}
WRONG = [
    ('{"prompt": "a"\n', "line 2: is no JSON: Expecting ',' delimiter"),
    ("[1]\n", "line 2: is no object, but list; expected"),
    ({"prompt": "a"}, 'line 2: has no \'completion\'; expected "prompt" and "completion"'),
    ({"answer": "a"}, "line 2: has 'answer'; expected one of"),
    ({"text": "a", "messages": []}, "line 2: has 'text', 'messages'; expected one of"),
    ({"text": "a"}, 'line 2: "text", but line 1 has "prompt" and "completion"; give one kind a file'),
    ({"prompt": ["a"], "completion": "b"}, 'line 2: "prompt" must be text, got list'),
    ({"prompt": "a", "completion": ""}, 'line 2: "completion" is empty, so that there is nothing to learn'),
    ('{"prompt": "\\ud800", "completion": "b"}\n', 'line 2: "prompt" has half of a character'),
]
WRONG_TALKS = [
    ({"messages": []}, '"messages" must be a list of at least one'),
    ({"messages": [{"role": "user"}]}, '"messages"[0] must be {"role": ..., "content": ...}'),
    (talk("a", [{"type": "text"}]), '"messages"[1]["content"] must be text, got list'),
    (talk("a", ""), '"messages"[1]["content"] is empty'),
    (talk("a"), 'no message is of the role "assistant"'),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]},
        "\"messages\"[0] has 'tool_calls', which",
    ),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_wrong_records(line, message, tokenizer, tmp_path):
    check_refused(write(tmp_path / "a.jsonl", GOOD, line), message, tokenizer)


@pytest.mark.parametrize(("line", "message"), WRONG_TALKS)
def test_wrong_conversations(line, message, tokenizer, tmp_path):
    check_refused(write(tmp_path / "a.jsonl", talk("a", "b"), line), f"line 2: {message}", tokenizer)


def check_refused(path, message, tokenizer):
    with pytest.raises(ValueError) as error:
        data.tokenize(path, tokenizer)
    assert message in str(error.value) and str(path.name) in str(error.value)


def test_all_wrong_lines_are_told_up_to_five(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", GOOD, *["nothing\n"] * 7)
    with pytest.raises(ValueError, match=r"a.jsonl line 2: .*a.jsonl line 6: [^;]*; and 2 more lines"):
        data.tokenize(file, tokenizer)
    alike = write(tmp_path / "a.jsonl", *['{"text": 1}\n'] * 7)
    check_refused(alike, f'{alike} in all 7 lines: "text" must be text, got int', tokenizer)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    check_refused(file, "line 1: is not UTF-8", tokenizer)


def test_data_without_documents(tokenizer, tmp_path):
    check_refused(write(tmp_path / "a.jsonl"), "a.jsonl has no documents with tokens", tokenizer)
    check_refused(write(tmp_path / "a.jsonl", GOOD), "a.jsonl has one document, and one must be held out", tokenizer)
    np.save(tmp_path / "a.npy", np.arange(3))
    check_refused(tmp_path / "a.npy", "a.npy holds token ids", tokenizer)
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    check_refused(tmp_path / "a.txt", "a.txt is not UTF-8 at byte 3", tokenizer)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "b.jsonl", GOOD)
    check_refused(tmp_path / "folder", "has b.jsonl; give one .jsonl file", tokenizer)
    with pytest.raises(FileNotFoundError, match=r"absent does not exist; give a .jsonl file"):
        data.tokenize(tmp_path / "absent", tokenizer)
