"""Conversations written by a tokenizer's chat template: what is learned and refused, beside transformers."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxshard import data
from jaxshard.data import chat_template
from tests.data.chat_templates import (
    AGAIN,
    ANSWERED,
    ASKED,
    CASES,
    CHAT,
    GEMMA,
    LAST,
    LLAMA3,
    MARKED,
    MISTRAL,
    QWEN,
    SYSTEM,
    TOOLS,
)  # fmt: skip
from tests.data.small_tokenizer import make_tokenizer
from tests.data.test_documents import texts_of, write

pytest.importorskip("jinja2")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tokenizer_with(folder, template, **settings):
    return data.tokenizer(make_tokenizer(folder, template=template, **settings))


def test_a_conversation_becomes_a_prompt(tmp_path):
    """With the system's message, tools, the special tokens of the tokenizer, and no other."""
    used = tokenizer_with(tmp_path, "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + MARKED)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    found = used.decode(used.apply_chat_template([SYSTEM, ASKED], tools=TOOLS, add_generation_prompt=True))
    said = "<|im_start|>system\nYou add numbers. <|im_end|>\n<|im_start|>user\ntwo and two?<|im_end|>\n"
    assert found == json.dumps(TOOLS[0], ensure_ascii=False) + said + "<|im_start|>assistant\n"
    named = [{"name": "default", "template": "{{ bos_token }}plain"}, {"name": "tool_use", "template": "tools"}]
    tokens = {"chat_template": named, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | tokens))
    used = data.tokenizer(tmp_path)
    assert used.decode(used.apply_chat_template([ASKED])) == "<s>plain"
    assert used.decode(used.apply_chat_template([ASKED], tools=TOOLS)) == "tools"
    with pytest.raises(TypeError, match=r"messages must be a list of .*, got \'two and"):
        used.apply_chat_template(ASKED["content"])
    with pytest.raises(ValueError, match="has no chat template; write the text of the prompt"):
        data.tokenizer(make_tokenizer(tmp_path / "none")).apply_chat_template([ASKED])


QUESTION = "<|im_start|>user\ntwo and two?<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "said", "learned"),
    [
        (MARKED, f"{QUESTION}<|im_start|>assistant\nfour.<|im_end|>\n", "four.<|im_end|>"),
        (MISTRAL, "[INST] two and two? [/INST] four.</s>", " four.</s>"),
        (GEMMA, f"<s>{QUESTION}<|im_start|>model\nfour.<|im_end|>\n", "four.<|im_end|>\n"),
    ],
    ids=["marked", "mistral", "gemma"],
)  # fmt: skip
def test_what_the_assistant_says_is_learned(template, said, learned, tmp_path):
    """As the template marks it, or else what it adds; nothing is appended, and a line takes the template's place."""
    used = tokenizer_with(tmp_path / "a", template.replace("bos_token", "'<s>'" if template is GEMMA else "''"))
    file = write(tmp_path / "a.jsonl", *({"messages": [ASKED, ANSWERED], "tools": []} for _ in range(2)))
    corpus = data.tokenize(file, used)
    assert texts_of(corpus.train, used) == (said, learned)
    corpus = data.tokenize(file, used, template="{role}:\n{content}\n")
    assert texts_of(corpus.train, used)[1] == "four.\n</s>"


def test_every_answer_of_a_conversation_is_learned(tmp_path):
    used = tokenizer_with(tmp_path / "a", LLAMA3)
    file = write(tmp_path / "a.jsonl", {"messages": [SYSTEM, *CHAT], "tools": TOOLS}, {"messages": CHAT})
    assert texts_of(data.tokenize(file, used).train, used)[1] == "four.<|im_end|>the row<|im_end|>"


def test_answers_that_a_template_changes_later_are_refused(tmp_path):
    """Qwen's leaves out what was thought before the last question; a template that marks answers may do so."""
    used = tokenizer_with(tmp_path / "a", QWEN)
    file = write(tmp_path / "a.jsonl", {"messages": [ASKED, ANSWERED]}, {"messages": CHAT})
    with pytest.raises(
        ValueError, match=r'a.jsonl line 2: the chat template does not write "messages"\[1\] as a con'
    ) as e:
        data.tokenize(file, used)
    assert "{% generation %}" in str(e.value) and "--template" in str(e.value) and "line 1" not in str(e.value)


REFUSED = {
    "{{ ''.__class__.__mro__ }}": "reads the attribute '__class__' of a str",
    "{{ messages | attr('__class__') }}": "reads the attribute '__class__' of a list",
    "{{ messages.append(1) }}": "reads the attribute 'append' of a list",
    "{{ namespace(__class__=1) }}": "sets '__class__' of a namespace",
    "{% set n = range(99999) %}{% for i in n %}{% for j in n %}{% endfor %}{% endfor %}": "more than 0.3 s of CPU time",
    "{{ 'a' * 10 ** 11 }}": "needs more than 512 MiB of memory",
    "{% if %}": "Expected an expression",
}


def test_templates_that_do_harm_are_refused_by_their_file(tmp_path, monkeypatch):
    """In one line, whatever the records."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    file = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"messages": CHAT})
    for template, reason in REFUSED.items():
        used = tokenizer_with(tmp_path / "a", template)
        with pytest.raises(ValueError) as caught:
            data.tokenize(file, used)
        assert str(caught.value).startswith(f"the chat template in {tmp_path / 'a' / 'tokenizer_config.json'}: ")
        assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_the_limit_of_time_holds_where_the_parent_ignores_its_signal():
    """As a process does that has loaded libtpu; a child inherits it."""
    script = Path(chat_template.__file__).with_name("render_chat.py")
    endless = "{% set n = range(99999) %}{% for i in n %}{% for j in n %}{% endfor %}{% endfor %}"
    asked = [{"templates": {"default": endless}}, {"name": "default", "variables": {}}]
    shell = 'trap "" PROF; exec "$0" -P "$1" 0.3 1000000000'
    command = ["bash", "-c", shell, sys.executable, str(script)]
    ended = subprocess.run(command, input="".join(json.dumps(one) + "\n" for one in asked), text=True, timeout=60)
    assert ended.returncode == -signal.SIGPROF


def test_conversations_that_a_template_refuses_are_told_by_their_lines(tmp_path):
    used = tokenizer_with(tmp_path / "a", GEMMA)
    file = write(tmp_path / "a.jsonl", {"messages": [ASKED, ANSWERED]}, {"messages": [ASKED, AGAIN, LAST]})
    with pytest.raises(ValueError, match=r"a.jsonl line 2: the chat template in .*: Conversation roles must alternate"):
        data.tokenize(file, used)
    macro = "{% macro f() %}x{% generation %}a{% endgeneration %}{% endmacro %}12{{ f() }}"
    with pytest.raises(ValueError, match="is in a macro or a filter"):
        tokenizer_with(tmp_path / "b", macro).apply_chat_template(CHAT)


def test_jinja2_must_be_there_and_new_enough(tmp_path, monkeypatch):
    used = tokenizer_with(tmp_path, MARKED)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.1.5")
    with pytest.raises(ImportError, match=r"needs jinja2>=3.1.6, and installed is 3.1.5: pip install 'jinja2>=3.1.6'"):
        used.apply_chat_template(CHAT)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case, tmp_path):
    """Token for token, and the mask of what is learned where the template marks it."""
    transformers = pytest.importorskip("transformers")
    template, conversations = CASES[case]
    folder = make_tokenizer(tmp_path / "a", template=template)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>", "unk_token": None}))
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), data.tokenizer(folder)
    for messages in conversations:
        for options in ({}, {"add_generation_prompt": True}, {"tools": TOOLS}):
            wanted = theirs.apply_chat_template(messages, return_dict=False, **options)
            assert ours.apply_chat_template(messages, **options) == wanted
    if case == "marked":
        wanted = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
        corpus = data.tokenize(write(tmp_path / "a.jsonl", *[{"messages": CHAT}] * 2), ours)
        assert corpus.train.tokens.tolist() == wanted["input_ids"]
        assert corpus.train.answers.tolist() == [bool(x) for x in wanted["assistant_masks"]]
