"""Every recipe is read, its layout fits its chips, and its README says what it prints."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import pytest

import jaxshard as js
from jaxshard.commands.flags import COMMANDS, Compute, Plan, Train
from jaxshard.commands.main import main
from jaxshard.commands.parse import parse
from jaxshard.commands.prepared import prepare
from jaxshard.core.layout import human_bytes
from tests.hf.checkpoints import write_folder

RECIPES = Path(__file__).parents[2] / "recipes"
README = (RECIPES / "README.md").read_text()
CHIPS = {"pretrain_gpt": ("v5e:2x4", 8), "finetune_lora": ("v5e:2x4", 8), "pod_3d": ("v5p:4x4x4", 64)}


def test_the_readme_names_every_recipe():
    assert {path.stem for path in RECIPES.glob("*.toml")} == set(re.findall(r"\[(\w+)\.toml\]", README)) == set(CHIPS)


def commands_of(name: str) -> list[list[str]]:
    """The command lines in a recipe's comments, without the word `jaxshard`."""
    lines = (RECIPES / f"{name}.toml").read_text().splitlines()
    text = " ".join(line.removeprefix("#     ").removesuffix("\\") for line in lines if line.startswith("#     "))
    return [command.split() for command in text.split("jaxshard ")[1:]]


@pytest.mark.parametrize("name", CHIPS)
def test_the_commands_in_the_comments_are_read(name, monkeypatch):
    monkeypatch.chdir(RECIPES.parent)
    assert commands_of(name)
    for command, *words in commands_of(name):
        parse(COMMANDS[command], words)


@pytest.mark.parametrize("name", CHIPS)
def test_a_recipe_has_a_layout_on_its_chips(name, tmp_path):
    flags = parse(Train, ["--config", str(RECIPES / f"{name}.toml")])
    compute = {one.name: getattr(flags, one.name) for one in dataclasses.fields(Compute)}
    target = flags.model
    if target.startswith("hf:"):
        write_folder(tmp_path, "llama")
        target, compute["seq"] = f"hf:{tmp_path}", None
    topology, chips = CHIPS[name]
    layout = prepare(Plan(target=target, **compute), functools.partial(js.plan.planned_mesh, topology)).layout
    assert layout.mesh.size == chips
    if name == "pod_3d":
        assert f"parameters        {human_bytes(layout.bytes_per_device()['param'])} " in README


@pytest.mark.slow
def test_the_scaled_down_pretraining_prints_the_losses_of_the_readme(tmp_path, monkeypatch, capsys):
    """Versions of JAX round bf16 in different ways, so only the first loss is the same on all of them."""
    assert jax.device_count() == 8
    monkeypatch.chdir(RECIPES.parent)
    outputs = ["--checkpoint", tmp_path / "gpt", "--log", tmp_path / "log", "--json", "-", "--sample", "0"]
    assert main([*commands_of("pretrain_gpt")[1], *map(str, outputs)]) == 0
    result = json.loads(capsys.readouterr().out)
    shown = re.search(r"first ([\d.]+), last ([\d.]+), held-out ([\d.]+) nats per byte", README)
    first, last, held_out = map(float, shown.groups())
    assert result["losses"][0] == pytest.approx(first, abs=1e-3)
    assert (result["losses"][-1], result["loss_eval"]) == pytest.approx((last, held_out), abs=0.05)
