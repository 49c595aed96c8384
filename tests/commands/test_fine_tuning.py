"""`jaxshard train --model hf:PATH`: training that begins with the weights of a folder, on packed documents."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

import jaxshard as js
from jaxshard.commands.flags import Train
from jaxshard.commands.job import Job
from jaxshard.commands.main import main
from jaxshard.commands.parallel import make_parallel
from jaxshard.commands.parse import parse
from jaxshard.commands.pretrained import Pretrained
from tests.data.small_tokenizer import make_word_tokenizer
from tests.hf.checkpoints import VOCAB, write_folder

TINY = ["--batch", "8", "--steps", "2", "--eval-every", "2", "--lr", "1e-3"]
ROWS = ["--seq", "16"]


@pytest.fixture(scope="module", autouse=True)
def eight_devices():
    """The number of simulated devices is fixed by the first touch, which must not be that of a test with --devices."""
    assert jax.device_count() == 8


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without a tokenizer, token ids, and records."""
    folder = tmp_path_factory.mktemp("folder")
    rng = np.random.default_rng(0)
    (folder / "llama").mkdir()
    write_folder(folder / "llama", "llama")
    np.save(folder / "ids.npy", rng.integers(0, VOCAB, 5000))

    def words(most):
        return " ".join(f"w{i}" for i in rng.integers(0, VOCAB - 1, rng.integers(1, most)))

    records = [{"prompt": words(6), "completion": f" {words(12)}"} for _ in range(120)]
    (folder / "records.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


@pytest.fixture(scope="module")
def with_tokenizer(folder):
    """The same model with its tokenizer."""
    (folder / "own").mkdir()
    write_folder(folder / "own", "llama")
    return make_word_tokenizer(folder / "own", VOCAB)


def train(*flags, capsys):
    assert main(["train", *TINY, *ROWS, "--sample", "0", *map(str, flags), "--json", "-"]) == 0
    output = capsys.readouterr()
    return json.loads(output.out), output.err


def first_loss(model, source, rows):
    """The loss of the first batch under the weights of the folder, without a mesh of more than one device."""
    made = js.hf.model(model, dtype="float32")
    layout = js.layout(js.ddp("data"), js.make_mesh(jax.devices()[:1], data=1), made.init, optax.sgd(0.1))
    params = js.hf.load(model, layout, dtype="float32")
    return float(made.loss(params, source.rows(0, np.arange(rows)), jax.random.key(0)).value)


@pytest.mark.slow
def test_token_ids_are_learned_from_the_weights_of_the_folder(folder, capsys):
    """The first loss is that of the folder's weights, to 1e-5 relative."""
    result, _ = train("--model", f"hf:{folder / 'llama'}", "--data", folder / "ids.npy", capsys=capsys)
    corpus = js.data.load(folder / "ids.npy", vocab=VOCAB)
    source = js.data.windows(corpus.train, batch=8, seq=16, seed=0)
    assert result["losses"][0] == pytest.approx(first_loss(folder / "llama", source, 8), rel=1e-5)
    assert result["losses"][1] != result["losses"][0] and result["corpus"]["vocab"] == VOCAB
    assert result["size"]["seq"] == 16 and "packing" not in result


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=8", "data=2,tensor=4", "data=2,tensor=2,pipe=2", "data=2,context=4"])
def test_answers_are_learned_on_every_mesh_and_go_on(mesh, folder, with_tokenizer, tmp_path, capsys):
    """Losses within 1e-5 of one device's, relative, saved and gone on with after the first step."""
    flags = ["--model", f"hf:{with_tokenizer}", "--data", folder / "records.jsonl"]
    expected, shown = train(*flags, "--devices", 1, capsys=capsys)
    corpus = js.data.tokenize(folder / "records.jsonl", js.data.tokenizer(with_tokenizer))
    source = js.data.packed(corpus.train, batch=8, seq=16, seed=0)
    assert expected["losses"][0] == pytest.approx(first_loss(with_tokenizer, source, 8), rel=1e-5)
    assert expected["packing"] == source.facts and expected["packing"]["learned"] < 1 - expected["packing"]["padding"]
    assert f"{source.facts['padding']:.1%} padding, {source.facts['learned']:.1%} of tokens in the loss" in shown
    run = ["--mesh", mesh, "--checkpoint", tmp_path / "run", "--checkpoint-every", 1]
    whole, _ = train(*flags, "--mesh", mesh, capsys=capsys)
    for name in ("losses", "loss_eval"):
        assert whole[name] == pytest.approx(expected[name], rel=1e-5)
    # The last of two saved steps is lost, so the first is gone on with, by the same plan of learning rates.
    start, _ = train(*flags, *run, capsys=capsys)
    shutil.rmtree(tmp_path / "run" / "2")
    end, _ = train(*flags, *run, "--resume", "--sample", 3, capsys=capsys)
    assert start["losses"] == whole["losses"] and end["losses"] == whole["losses"][1:]
    assert (end["start"], len(end["losses"])) == (1, 1) and set(end["sample"]) == {"prompt", "text", "temperature"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "lora"), [("data=2,tensor=4", "rank=4"), ("data=4,pipe=2", "rank=4,alpha=8,base=bf16")]
)
def test_factors_are_trained_saved_and_merged(mesh, lora, folder, with_tokenizer, tmp_path, capsys):
    """The frozen model is in no checkpoint; the export has the held-out loss of the run that made it, to 1e-5."""
    flags = ["--model", f"hf:{with_tokenizer}", "--data", folder / "records.jsonl", "--lora", lora, "--mesh", mesh]
    run = [*flags, "--checkpoint", tmp_path / "run", "--checkpoint-every", 1]
    whole, _ = train(*run, "--export", tmp_path / "tuned", capsys=capsys)
    one, _ = train(*[*flags[:-2], "--devices", 1], capsys=capsys)
    assert whole["losses"] == pytest.approx(one["losses"], rel=1e-5 if "bf16" not in lora else 1e-3)
    frozen = (with_tokenizer / "model.safetensors").stat().st_size
    assert sum(x.stat().st_size for x in (tmp_path / "run" / "1" / "arrays").rglob("*")) < frozen
    shutil.rmtree(tmp_path / "run" / "2")
    end, _ = train(*run, "--resume", capsys=capsys)
    assert end["losses"] == whole["losses"][1:] and end["loss_eval"] == pytest.approx(whole["loss_eval"], rel=1e-6)
    assert main(["train", *TINY, *ROWS, *map(str, run), "--resume", "--lora", "rank=2"]) == 2
    assert f"has --lora {lora}, now it is rank=2" in capsys.readouterr().err

    done = ["--steps", "1", "--export", tmp_path / "again"]
    ended, shown = train(*run, "--resume", *done, capsys=capsys)
    assert "2 of 1 steps are done" in shown and "compiling" not in shown and ended["start"] == 2
    for file in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "tuned" / file).read_bytes()

    names = ("tokenizer.json", "tokenizer_config.json")
    assert all((tmp_path / "tuned" / name).read_bytes() == (with_tokenizer / name).read_bytes() for name in names)
    config, before = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "tuned", with_tokenizer))
    assert config["architectures"] == before["architectures"]
    again = ["--model", f"hf:{tmp_path / 'tuned'}", "--data", folder / "records.jsonl", "--lr", "1e-30", "--devices", 1]
    after, _ = train(*again, capsys=capsys)
    assert after["loss_eval"] == pytest.approx(whole["loss_eval"], rel=1e-5 if "bf16" not in lora else 1e-3)


@pytest.mark.slow
def test_a_step_of_the_model_is_compared_and_audited(folder, tmp_path, capsys):
    """With the shape of the folder's config.json and weights that are drawn."""
    for command, words in (("parity", ["--batch", "8"]), ("audit", ["--batch", "8", "--seq", "16"])):
        file, mesh = tmp_path / f"{command}.json", ["--mesh", "data=2,tensor=4"]
        assert main([command, f"hf:{folder / 'llama'}", *mesh, *words, "--json", str(file)]) == 0
        assert json.loads(file.read_text())["ok"]
        assert main([command, f"hf:{folder}", *mesh]) == 2
        assert "has no config.json" in capsys.readouterr().err


def test_factors_need_a_model_to_freeze(folder, capsys):
    for flags, message in [
        (["--model", "gpt-1m", "--lora", "rank=4"], "there is nothing to freeze; give the weights, as --model hf:PATH"),
        (["--model", f"hf:{folder / 'llama'}", "--lora", "rank=4,match=nope"], "'nope' matches no parameter"),
        (["--model", f"hf:{folder / 'llama'}", "--lora", "rank=4", "--bad-steps", "rollback"], "is in no checkpoint"),
        (["--model", f"hf:{folder / 'llama'}", "--export", folder / "llama"], "there is a model already"),
    ]:
        assert main(["train", *TINY, *ROWS, "--data", str(folder / "ids.npy"), *map(str, flags)]) == 2
        assert message in capsys.readouterr().err


def test_parameters_that_train_are_told(folder):
    """Of one matrix [32, 8, 4] in each of four blocks the factors [32, 2] and [2, 8, 4]."""
    words = ["--model", f"hf:{folder / 'llama'}", "--data", str(folder / "ids.npy"), *TINY, *ROWS]
    for lora, shown in (["--lora", "rank=2,match=q_proj/kernel"], ", of which 512 train ("), ([], " parameters ("):
        flags = parse(Train, [*words, *lora])
        assert shown in Job(Console(quiet=True), flags, make_parallel(flags)).shown["model"]


@pytest.mark.slow
def test_a_ready_made_size_takes_the_vocabulary_of_a_tokenizer(folder, with_tokenizer, tmp_path, capsys):
    """The tokenizer goes with the model that is exported."""
    flags = ["--model", "llama-1m", "--change", "depth=1,width=64", "--tokenizer", with_tokenizer, "--devices", 1]
    flags += ["--export", tmp_path / "made"]
    result, _ = train(*flags, "--data", folder / "records.jsonl", "--sample", 2, capsys=capsys)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "made" / name).read_bytes() == (with_tokenizer / name).read_bytes()
    assert result["size"]["vocab"] == result["corpus"]["vocab"] == VOCAB and result["corpus"]["unit"] == "token"
    assert result["sample"]["prompt"].startswith("w") and result["packing"]["documents"] == 111


REFUSED = [
    ([], "--model hf:PATH is fine-tuned on your own data: add --data FILE"),
    (["--data", "records.jsonl"], "has no tokenizer.json to read it with; add --tokenizer PATH, or give token ids"),
    (["--data", "ids.npy", "--vocab", "95"], "outside the vocabulary of 95"),
    (["--data", "ids.npy", "--vocab", "97"], "its vocabulary has 96 token ids, and ids.npy has 97"),
    (["--data", "ids.npy", "--seq", "65"], "--seq 65: the model takes at most 64 tokens in a row"),
    (["--data", "ids.npy", "--template", "{content}"], "--template {content} is for records that a tokenizer reads"),
    (["--data", "ids.npy", "--change", "vocab=8"], "--change vocab=8: the vocabulary is that of the corpus"),
    (["--data", "ids.npy", "--tokenizer", "absent"], "absent does not exist; give a tokenizer.json, or a folder"),
    (["--data", "ids.npy", "--model", "hf:absent"], "there is no folder absent"),
    (["--data", "ids.npy", "--model", "hf:."], "has no config.json"),
    (["--tokenizer", "x"], "--tokenizer x makes tokens of a text; name it with --data"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_is_refused(flags, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    check_refused(flags, message, capsys)


def check_refused(flags, message, capsys):
    given = [] if "--model" in flags else ["--model", "hf:llama"]
    assert main(["train", *TINY, *([] if "--seq" in flags else ROWS), *given, *map(str, flags)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxshard: ") and error.count("\n") == 1 and message in error


def test_another_vocabulary_than_the_tokenizers_is_refused(folder, with_tokenizer, tmp_path, capsys):
    records = ["--data", folder / "records.jsonl"]
    for count in (64, 95, 97, 300):
        other = make_word_tokenizer(tmp_path / str(count), count)
        message = f"its vocabulary has {VOCAB} token ids, and the tokenizer {other / 'tokenizer.json'} has {count}; use"
        check_refused(["--model", f"hf:{folder / 'llama'}", *records, "--tokenizer", other], message, capsys)
    check_refused(
        ["--model", f"hf:{with_tokenizer}", *records, "--dtype", "uint16"], "a tokenizer knows its own", capsys
    )


def test_rows_of_padding_in_a_vocabulary_are_told():
    model = Pretrained(Path("qwen"), 151_936, 1024)
    assert model.check_vocab(151_936, "x") == ""
    assert model.check_vocab(151_665, "x").startswith("271 of the 151936 rows of the model's vocabulary are padding: x")
    for other in (151_937, 140_000):
        with pytest.raises(ValueError, match="use the tokenizer that the model was trained with"):
            model.check_vocab(other, "x")
    with pytest.raises(ValueError, match="its vocabulary has 50257 token ids, and x has 50256"):
        Pretrained(Path("gpt2"), 50_257, 1024).check_vocab(50_256, "x")
