"""Where generated text ends: at the end of text of tokenizer and configuration, and at `--stop`."""

import json

import numpy as np
import pytest

from jaxshard.commands.main import main
from jaxshard.commands.stops import Bytes, Stops, ends_of_text, parse_stops
from jaxshard.data.tokenizer import tokenizer
from tests.data.small_tokenizer import make_tokenizer, make_word_tokenizer
from tests.hf.checkpoints import VOCAB, write_folder

PROMPT = "w5 w17 w3"
GREEDY = "w38 w80 w38 w7 w7 w38 w80 w38 w26"
"""What the model of `make_folder` continues `PROMPT` with."""


def make_folder(folder, **entries):
    """Write a model whose tokens are the words w0 to w94 and "</s>"."""
    folder.mkdir()
    write_folder(folder, "llama", **{"eos_token_id": None} | entries)
    return make_word_tokenizer(folder, VOCAB)


def generate(folder, *flags, capsys):
    capsys.readouterr()
    assert main(["generate", "--model", f"hf:{folder}", "--prompt", PROMPT, *flags, "--json", "-"]) == 0
    output = capsys.readouterr()
    return json.loads(output.out), output.err


@pytest.mark.slow
def test_a_text_and_an_answer_end_at_the_end_of_text_of_the_configuration(tmp_path, capsys):
    pytest.importorskip("jinja2")
    folder = make_folder(tmp_path / "model", eos_token_id=26)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [94, 7]}))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    result, shown = generate(folder, "--chat", "w17 w3", "--system", "w5", capsys=capsys)
    assert result["text"] == [f"{PROMPT} w38 w80 w38", " w38 w80 w38"] and f"\n{PROMPT} w38 w80 w38\n" in shown
    assert result["tokens"] == [[5, 17, 3, 38, 80, 38, 7]] * 2
    assert result["stop"] == [95, 94, 7, 26] and result["length"] == 62  # as many as 64 positions have room for


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--stop", "w7"], "w38 w80 w38 "),
        (["--stop", "w26", "--stop", "w7 w38"], "w38 w80 w38 w7 "),
        (["--stop", "38 w7"], "w38 w80 w"),
        (["--stop", "26, 7"], "w38 w80 w38"),
        (["--stop", "w17", "--stop", "unknown", "--length", "9"], GREEDY),  # the prompt's own, and no w0
    ],
)
def test_a_text_ends_at_texts_and_tokens(flags, expected, tmp_path, capsys):
    result, _ = generate(make_folder(tmp_path / "model"), *flags, capsys=capsys)
    assert result["text"] == [f"{PROMPT} {expected}"]


@pytest.mark.slow
def test_an_empty_answer_says_what_ended_it(tmp_path, capsys):
    pytest.importorskip("jinja2")
    folder = make_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    result, shown = generate(folder, "--chat", PROMPT, "--stop", "38", "--length", "2", capsys=capsys)
    assert result["text"][1] == ""
    assert f"note: the answer to {PROMPT!r} is empty: the model began with 'w38', which ends it" in shown


@pytest.mark.slow
def test_a_tokenizer_without_an_end_of_text_is_noted(tmp_path, capsys):
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    _, shown = generate(folder, "--length", "1", capsys=capsys)
    assert f"note: {folder} names no token that ends a text (eos_token); end texts by --stop" in " ".join(shown.split())


def test_a_text_needs_a_tokenizer(tmp_path, capsys):
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    words = ["--model", f"hf:{folder}", "--prompt-tokens", "5,17", "--stop"]
    assert main(["generate", *words, "</s>"]) == 2
    assert "--stop </s>: the model has no tokenizer.json beside it" in capsys.readouterr().err


@pytest.mark.slow
def test_tokens_without_a_tokenizer_end_there_too(tmp_path, capsys):
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    words = ["--model", f"hf:{folder}", "--prompt-tokens", "5,17,3", "--stop", "7"]
    assert main(["generate", *words]) == 0
    assert capsys.readouterr().out.endswith("\n38 80 38\n")


def test_stops_by_a_tokenizer_that_puts_a_token_in_front_of_texts(tmp_path):
    """A text is found however the model writes it, and never in the prompt or as the token of something else."""
    words = tokenizer(make_tokenizer(tmp_path / "words"))
    begin, end = (words.encode_part(text)[0] for text in ("<s>", "</s>"))
    stops = parse_stops(["</s>", r"\n\n", "two", "300,7"], words, ends_of_text(words, None))
    assert stops == Stops((end, 300, 7), ("</s>", "\n\n", "two"))
    assert stops.sequences(words)[3:5] == [[end], words.encode_part("\n\n")] and begin not in stops.sequences(words)
    (prompt,) = words.encode(["two:"])
    for new, kept in [("a row</s>", "a row"), ("a row.\n\nb", "a row."), ("is two", "is "), ("numbers", "numbers")]:
        row = [*prompt, *words.encode_part(new)]
        assert stops.cut_text(row, len(prompt), words) == f"<s>two:{kept}"
    cut = [*words.encode_part("a"), 300, *words.encode_part("row")]
    assert stops.cut(cut, 0) == cut[:1] and stops.cut(cut, 2) == cut


def test_stops_of_bytes():
    stops = parse_stops(["def ", "é"], Bytes(), ends_of_text(Bytes(), None))
    assert stops.sequences(Bytes()) == [list(b"def "), list("é".encode())]
    row = list(b"def x\ndef y")
    assert stops.cut_text(row, 4, Bytes()) == "def x\n"
    assert stops.cut_text(list("café".encode()), 4, Bytes()) == "caf"  # the prompt ends within the letter


@pytest.mark.slow
def test_the_sample_of_a_training_ends_with_the_text(tmp_path, capsys):
    """Every document is one word and the end of text, which is what the model has learned to draw."""
    words = make_word_tokenizer(tmp_path / "words", VOCAB)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": f"w{i % 3}"}) + "\n" for i in range(2000)))
    size = ["--model", "llama-1m", "--change", "width=16,depth=1,heads=4,kv_heads=4,hidden=32", "--batch", "16"]
    size += ["--steps", "30", "--seq", "16", "--lr", "3e-2", "--devices", "1"]
    data = ["--data", str(tmp_path / "data.jsonl"), "--tokenizer", str(words)]
    assert main(["train", *size, *data, "--sample", "200", "--json", "-"]) == 0
    sample = json.loads(capsys.readouterr().out)["sample"]
    assert len(sample["text"].split()) < 20 and "</s>" not in sample["text"]


def test_a_damaged_configuration_is_named(tmp_path):
    folder = make_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        ends_of_text(None, folder)
    assert np.array_equal(ends_of_text(None, make_folder(tmp_path / "other", eos_token_id=[3, 4])), [3, 4])
