"""`jaxshard generate`: prompts of text and of tokens, from a saved run and from a folder of Hugging Face's."""

import json

import numpy as np
import pytest

import jaxshard as js
from jaxshard.commands.main import main

pytestmark = pytest.mark.fast_cases(4)

SMALL = "width=16,depth=2,heads=4,kv_heads=4,hidden=32"


@pytest.mark.slow
def test_tokens_go_to_standard_output_as_one_object(capsys):
    """The weights are random, which a note says; text is read as bytes."""
    words = ["--model", "llama-1m", "--change", SMALL, "--mesh", "data=1", "--length", "5"]
    assert main(["generate", *words, "--prompt", "hi", "--prompt-tokens", "1, 5,9", "--json", "-"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert [row[:3] for row in result["tokens"]][1] == [1, 5, 9] and result["tokens"][0][:2] == list(b"hi")
    assert [len(row) for row in result["tokens"]] == [7, 8] and result["text"][0].startswith("hi")
    assert "its weights are random, of --seed 0" in output.err


@pytest.mark.slow
def test_factors_without_their_model_are_refused(tmp_path, capsys):
    model = js.models.llama(vocab=256, width=16, depth=1, heads=4, kv_heads=4, hidden=32, seq=32)
    tuned = js.lora(model.init, model.loss, rank=2, match=["q_proj/kernel"])
    layout = js.layout(js.fsdp(), js.make_mesh(data=8), tuned.init)
    js.save(tmp_path / "run", js.init(tuned.init, None, layout, 0), layout)
    words = ["--model", "llama-1m", "--change", SMALL, "--checkpoint", str(tmp_path / "run"), "--prompt", "a"]
    assert main(["generate", *words]) == 2
    message = f"--checkpoint {tmp_path / 'run'} holds LoRA factors; write the merged model with jaxshard train ... --r"
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no prompt: give --prompt TEXT, --prompt-tokens 1,5,9 or --chat TEXT"),
        (["--prompt", ""], "--prompt '' is empty"),
        (["--prompt", "a", "--length", "40"], "use a length of at most 32"),
        (["--prompt", "a" * 33], "a prompt of 33 tokens is longer than the 32 positions that the model was built for"),
        (["--prompt-tokens", "1,x"], "--prompt-tokens 1,x: write token ids with commas"),
        (["--prompt-tokens", "1,300"], "prompt 0 has the token 300, but the model knows 0 to 255"),
        (["--prompt", "a", "--change", "vocab=99"], "--prompt a: the model has no tokenizer.json"),
        (["--chat", "a"], "--chat a: the model has no tokenizer.json and chat template; give --tokenizer PATH"),
        (["--prompt", "a", "--system", "b"], "--system b: it comes before a message; add --chat TEXT"),
        (["--prompt", "a", "--top-k", "3"], "temperature=0 takes the most likely token"),
    ],
)
def test_refusals(words, message, capsys):
    change = [] if "--change" in words else ["--change", SMALL]
    assert main(["generate", "--model", "llama-1m", *change, *words, "--mesh", "data=1"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_run_that_was_trained_and_saved_on_another_mesh(tmp_path, capsys):
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 40, 5000, dtype=np.uint8))
    train = ["--data", str(tmp_path / "tokens.npy"), "--vocab", "40", "--steps", "2", "--batch", "8", "--seq", "24"]
    train += ["--model", "llama-1m", "--change", SMALL, "--devices", "8", "--checkpoint", str(tmp_path / "run")]
    assert main(["train", *train, "--sample", "30"]) == 0
    capsys.readouterr()
    words = ["--model", "llama-1m", "--change", f"{SMALL},vocab=40", "--checkpoint", str(tmp_path / "run")]
    words += ["--prompt-tokens", "1,2,3", "--length", "20", "--mesh", "data=2,tensor=4"]
    assert main(["generate", *words, "--json", "-"]) == 0
    (tokens,) = json.loads(capsys.readouterr().out)["tokens"]
    model = js.models.llama(vocab=40, width=16, depth=2, heads=4, kv_heads=4, hidden=32, seq=24, rope_base=500_000)
    layout = js.layout(js.fsdp(), js.make_mesh(data=8), model.init)
    run = js.restore(tmp_path / "run", layout)
    assert js.generate(model, run, layout, [[1, 2, 3]], length=20) == [tokens] and run.opt_state is None
    assert main(["generate", *words[:-1], "data=1", "--stop", str(tokens[7])]) == 0
    assert main(["generate", *words[:4], *words[6:]]) == 0  # random weights
    assert main(["generate", "--model", "gpt-1m", "--change", "vocab=40", *words[4:]]) == 2
    assert "missing in the checkpoint" in capsys.readouterr().err
