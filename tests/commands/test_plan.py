"""`jaxshard plan`: the JSON object, and what is refused by name."""

import importlib.util
import io
import json
import re

import jax
import pytest
from rich.console import Console

from jaxshard.commands.low_rank import add_factors
from jaxshard.commands.main import main
from jaxshard.commands.named_model import NamedModel
from jaxshard.commands.terminal import working
from jaxshard.core.tree import path_str

KEYS = {
    "fits", "hbm_bytes", "live_bytes", "allocated_bytes", "judged_by", "by_role", "collectives", "step_seconds", "mesh",
    "topology",
}  # fmt: skip
TINY = ["llama-1m", "--batch", "16", "--seq", "32", "--change", "depth=1"]

without_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def plan(capsys, *words):
    assert main(["plan", *words, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize(
    ("topology", "mesh", "usable"),
    [("v5e:2x4", "data=4,tensor=2", 2**34), pytest.param("h100:8x2", "data=16", 80e9, marks=pytest.mark.slow)],
)
def test_chips_that_are_not_here(topology, mesh, usable, capsys):
    result, err = plan(capsys, *TINY, "--topology", topology, "--mesh", mesh, "--price", "1.2", "--estimate")
    assert result.keys() >= KEYS
    assert result["fits"] is True and result["hbm_bytes"] <= usable
    assert sum(result["by_role"].values()) == result["live_bytes"] > 0
    assert (result["judged_by"], result["allocated_bytes"]) == ("estimate", None)
    assert "fits" in err and topology in err and "an estimate; 95 % of steps" in err
    assert "tokens [16, 33]" in err and re.search(r"\de[+-]?\d", err) is None


@pytest.mark.slow
def test_only_factors_have_gradients_and_optimizer_state(capsys):
    """Two moments of Adam for the factors [in, 4] and [4, out] of each matrix, in f32, and two counts of steps."""
    flags = ["--topology", "h100:8x2", "--strategy", "ddp", "--estimate", "--lora"]
    result, err = plan(capsys, *TINY, *flags, "rank=4")
    tuned = add_factors(NamedModel("llama-1m", "depth=1").model(), "rank=4")
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(tuned.init, jax.random.key(0)))
    factors = sum(x.size for path, x in leaves if path_str(path).endswith(("/a", "/b")))
    assert "note: the frozen matrices are kept in f32; --lora base=bf16 saves" in err
    assert result["by_role"]["optimizer state"] - 2 * 4 * factors == 2 * 4
    assert result["model"].endswith("--lora rank=4")
    assert "note:" not in plan(capsys, *TINY, *flags, "rank=4,base=bf16")[1]


@pytest.mark.slow
def test_several_slices_multiply_the_devices(capsys):
    mesh = ["--strategy", "hsdp", "--mesh", "replica=2,data=8", "--slices", "2", "--topology", "v5e:2x4"]
    result, _ = plan(capsys, *TINY, *mesh)
    assert (result["devices"], result["slices"], result["mesh"]) == (16, 2, {"replica": 2, "data": 8})


@pytest.mark.slow
def test_what_does_not_fit_is_a_plain_answer(capsys):
    result, err = plan(
        capsys, "llama3-405b", "--topology", "v5e:2x4", "--batch", "8", "--change", "depth=12", "--estimate"
    )
    assert result["fits"] is False and "does not fit" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["llama3-8", "--topology", "v5e:4x4"],
            "llama3-8: there is no such size; did you mean llama3-8b? Use one of gpt-1m",
        ),
        (["llama-1m", "--topology", "v5e:4x5"], "v5e is not rented as 4x5; near it are v5e:4x4"),
        (["llama-1m", "--topology", "v5e:4x4", "--mesh", "data=8"], "data=8 needs 8 devices, but there are 16"),
        (["llama-1m", "--topology", "v5e:4x4", "--devices", "4"], "--devices 4 is for the devices that are here"),
        (["llama-1m", "--slices", "2"], "--slices 2 is of a TPU topology; add --topology"),
        (["llama-1m", "--codegen"], "--codegen asks the compiler of other devices; add --topology"),
        (["llama-1m"], "for which chips? Add --topology, such as v5e:16x16 (TPUs) or h100:8x4"),
        (["llama-1m", "--topology", "v5e:4x4", "--estimate", "--codegen"], "leave one out"),
        (["llama-1m", "--topology", "v5e:4x4", "--lora", "alpha=4"], "--lora alpha=4: there is no rank; write rank=8"),
        (["llama-1m", "--chip", "v55"], "there is no chip 'v55'; use one of v5"),
    ],
)
def test_faulty_flags_are_refused_by_name(words, message, capsys):
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_pictures_stand_beside_each_other(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    plan(capsys, *TINY, "--topology", "v5e:2x2", "--plot", str(file))
    assert {path.name for path in tmp_path.iterdir()} == {"plan.svg", "plan-shards.svg", "plan-roofline.svg"}
    assert all(name in file.read_text() for name in ("ddp", "zero1", "zero2", "fsdp"))
    assert main(["plan", *TINY, "--topology", "v5e:2x2", "--plot", str(tmp_path / "plan.xyz")]) == 2
    assert "pictures are written as .png, .svg" in capsys.readouterr().err


def test_a_terminal_shows_the_time_since_the_start():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with working(console, "asking") as say:
        say("another thing")
    assert "another thing" in console.file.getvalue() and "0:00:00" in console.file.getvalue()


@without_libtpu
@pytest.mark.tpu
@pytest.mark.slow
def test_the_compiler_confirms_or_refuses(capsys):
    words = ["--topology", "v5e:2x2"]
    small, _ = plan(capsys, *TINY, *words)
    assert small["fits"] is True and small["judged_by"] == "compiler"
    assert 0 < small["live_bytes"] <= small["allocated_bytes"] < small["hbm_bytes"]
    assert any(".py:" in one["array"] for one in small["largest"])
    whole, _ = plan(capsys, *TINY, *words, "--codegen")
    assert whole["compiled"]["estimated_cycles"] > 0
    assert whole["compiled"]["allocated_bytes"] == small["allocated_bytes"]
    large, err = plan(capsys, "llama2-7b", "--change", "depth=20", "--batch", "16", "--seq", "4096", *words)
    assert large["fits"] is False and large["allocated_bytes"] > large["hbm_bytes"] and large["refusal"]
    assert "does not fit" in err
