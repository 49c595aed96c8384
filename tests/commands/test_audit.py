"""`jaxshard audit`: status, table, JSON and source lines."""

import json
import re

import jax
import pytest

from jaxshard.commands.main import main
from tests.checks.programs.texts import FSDP, gather, step_text
from tests.toys import quick_compile

MODEL = """
import jax
import jax.numpy as jnp
import optax

import jaxshard as js

VOCAB, WIDTH = 40, 16


def init(key):
    shapes = {"embedding": (VOCAB, WIDTH), "up": (WIDTH, 64), "down": (64, WIDTH), "lm_head": (WIDTH, VOCAB)}
    params = {name: jax.random.normal(key, shape) / 4 for name, shape in shapes.items()}
    return {name: x if name == "embedding" else {"kernel": x} for name, x in params.items()}


def loss_with(seen):
    def loss(params, batch, key):
        x = params["embedding"][batch["tokens"]]
        x = jnp.tanh(x @ params["up"]["kernel"]) @ params["down"]["kernel"]
        logits = seen(x @ params["lm_head"]["kernel"])
        nats = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["tokens"][..., None], -1)[..., 0]
        return js.Mean(nats.sum(), nats.size)

    return loss


BATCH = {"tokens": jax.ShapeDtypeStruct((8, 4), jnp.int32)}


def plain():
    return init, loss_with(lambda x: x), optax.adam(1e-3), BATCH


def gathers():
    return init, loss_with(lambda x: js.constrain(x, ("batch", None, None))), optax.adam(1e-3), BATCH
"""


@pytest.fixture(scope="module", autouse=True)
def eight_devices():
    assert jax.device_count() == 8


@pytest.fixture
def model(tmp_path):
    file = tmp_path / "language.py"
    file.write_text(MODEL)
    return file


def run(*args):
    with quick_compile():
        return main(["audit", *args])


def test_a_model_that_keeps_the_promise(model, capsys):
    """Before the result a line says that it compiles, which takes minutes for a pod."""
    assert run(f"{model}:plain", "--mesh", "data=4,tensor=2", "--strategy", "ddp") == 0
    out = capsys.readouterr().out
    # Embedding, up, down and lm_head, half of each on a tensor device: (2 x 40 x 16 + 2 x 16 x 64) / 2 x 4 bytes.
    assert re.search(r"^all-reduce +data +6\.66 kB +6\.66 kB ", out, re.MULTILINE), out
    assert 0 <= out.find("compiling ...") < out.find("as promised") and "surprise" not in out


def test_a_surprise_is_named_with_its_line_and_ends_with_status_1(model, capsys, tmp_path):
    file = tmp_path / "audit.json"
    flags = ["--mesh", "data=4,tensor=2", "--strategy", "ddp", "--json", str(file)]
    assert run(f"{model}:gathers", *flags) == 1
    # JAX 0.12 names what is moved after the line that made it.
    lines = [i for i, text in enumerate(MODEL.splitlines(), 1) if "js.constrain(" in text or "logits = seen(" in text]
    places = [f"{model}:{line}" for line in lines]
    out = capsys.readouterr().out
    assert any(f"at {place}\n" in out for place in places)
    assert "all-gather over tensor, once, 1.28 kB: f32[2, 4, 40]" in out
    assert "logits, all 40 of a vocabulary: must never move over tensor" in out
    assert out.rstrip().endswith("1 surprise") and "js.constrain(x, ('batch', None, 'vocab'))" in out
    result = json.loads(file.read_text())
    assert not result["ok"] and result["mesh"] == {"data": 4, "tensor": 2}
    assert result["synchronous"] == result["rematerialized"] == result["host"] == []  # of a CPU there is nothing to say
    (surprise,) = result["surprises"]
    assert [surprise[name] for name in ("kind", "axis", "count", "bytes")] == ["all-gather", "tensor", 1, 1280]
    assert surprise["place"] in places
    assert {"kind": "all-reduce", "axis": "data", "promised": 6656, "bytes": 6656, "count": 1} in result["collectives"]


@pytest.mark.slow
def test_by_default_the_audit_is_short_and_all_is_behind_a_flag(model, capsys):
    """Three kinds of arrays over tensor, and bf16 that the CPU sends as f32: a note, and no list of either."""
    flags = [f"{model}:plain", "--mesh", "data=4,tensor=2", "--strategy", "fsdp", "--precision", "bf16"]
    assert run(*flags) == 0
    brief = capsys.readouterr().out
    assert run(*flags, "--all") == 0
    whole = capsys.readouterr().out
    assert "a CPU's compiler sends bf16 as f32" in brief and "in f32 in place of" not in brief
    assert "by source line" not in brief and "by source line" in whole and "in f32 in place of" in whole
    assert len(brief.splitlines()) < 20 < len(whole.splitlines())
    for out in (brief, whole):
        assert out.rstrip().endswith("no surprises") and "as promised" not in out


def test_the_automatic_engine(model, capsys):
    assert run(f"{model}:plain", "--engine", "auto", "--strategy", "zero2") == 0
    assert "as promised" in capsys.readouterr().out


@pytest.mark.slow
def test_a_ready_made_size_as_json_on_standard_output(capsys):
    assert run("gpt-1m", "--batch", "8", "--seq", "8", "--json", "-") == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["ok"] and result["surprises"] == [] and result["missing"] == []
    assert all(row["promised"] == row["bytes"] for row in result["collectives"])
    assert {row["kind"] for row in result["collectives"]} == {"all-reduce", "reduce-scatter", "all-gather"}
    assert "as promised" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["gpt-0"], "there is no such size"),
        (["gpt-1m", "--batch", "3"], "3 rows, which the 8 devices"),
        (["gpt-1m", "--json", "/nowhere/audit.json"], "the folder /nowhere does not exist"),
        ([], "name a model or a function"),
        (["gpt-1m", "--hlo", "step.txt"], "give gpt-1m or --hlo, not both"),
        (["--hlo", "step.txt"], "--hlo needs --mesh"),
        (["--hlo", "step.txt", "--mesh", "data=8"], "step.txt: No such file or directory"),
        (["--hlo", "step.txt", "--mesh", "data=8", "--engine", "auto"], "--engine auto is of a step that is still to"),
    ],
)
def test_wrong_flags_end_with_status_2_and_one_line(flags, message, capsys):
    assert main(["audit", *flags]) == 2
    out, err = capsys.readouterr()
    assert message in err and len(err.splitlines()) == 1 and not out


def test_the_text_of_anyones_step(tmp_path, capsys):
    """Status 0 without a strategy or where it is kept, 1 where it is not; JSON has every surprise."""
    file = tmp_path / "step.txt"
    file.write_text(step_text(*FSDP, gather("moment", name="m")))
    flags = ["--hlo", str(file), "--mesh", "data=8"]
    assert main(["audit", *flags]) == 0
    out = capsys.readouterr().out
    assert "all-gather      data  weight" in out and "surprise" not in out
    read = f"{file}: jit_step for 8 devices (data=8): collectives move 8.39 MB, and the device waits for all of them"
    assert out.splitlines()[0] == f"{read}; no strategy named: nothing was compared"
    assert main(["audit", *flags, "--strategy", "fsdp", "--json", "-"]) == 1
    result = json.loads(capsys.readouterr().out)
    (surprise,) = result["surprises"]
    assert not result["ok"] and result["file"] == str(file) and surprise["place"] == "/home/user/train.py:12"
    assert surprise["why"].startswith("state.opt_state[0].mu['up']: no strategy communicates moments")
    assert main(["audit", *flags, "--strategy", "fsdp", "--all"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("1 surprise")
    file.write_text(step_text(*FSDP))
    assert main(["audit", *flags, "--strategy", "fsdp"]) == 0
    assert "could not read" not in capsys.readouterr().out
    file.write_text(step_text(gather(), gather(name="again")))
    assert main(["audit", *flags, "--strategy", "fsdp"]) == 1
    assert capsys.readouterr().out.rstrip().endswith("could not read sums of gradients over data")
    file.write_text("module @jit_step {}")
    assert main(["audit", *flags]) == 2
    assert "this is StableHLO" in capsys.readouterr().err
