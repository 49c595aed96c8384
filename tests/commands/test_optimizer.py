"""`--optimizer`, `--warmup`, `--decay` and `--clip`: the updates and rates that they stand for."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.commands.main import main
from jaxshard.commands.optimizer import make_optimizer, make_rate
from jaxshard.models.recipe import Recipe

RECIPE = Recipe(batch=8, steps=10, learning_rate=0.1, warmup=2, b2=0.97, weight_decay=0.3)
PARAMS = {"w": jnp.linspace(-1, 1, 6).reshape(2, 3)}


def updates(tx, count=4):
    """The updates of some steps with growing gradients."""
    state, found = tx.init(PARAMS), []
    for number in range(count):
        update, state = tx.update(jax.tree.map(lambda x, n=number: (n + 1) * x, PARAMS), state, PARAMS)
        found.append(np.asarray(update["w"]))
    return found


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (None, lambda rate: RECIPE.optimizer()),
        ("adamw", lambda rate: RECIPE.optimizer()),
        ("adamw,b1=0.8,weight_decay=0", lambda rate: optax.adamw(rate, b1=0.8, b2=0.97, weight_decay=0)),
        ("lion, b2=0.98", lambda rate: optax.lion(rate, b2=0.98)),
        ("sgd,momentum=0.9,nesterov=on", lambda rate: optax.sgd(rate, 0.9, nesterov=True)),
        ("muon,ns_steps=3", lambda rate: optax.contrib.muon(rate, ns_steps=3)),
        ("adam8bit", lambda rate: js.optim.adam8bit(rate)),
    ],
)
def test_a_name_and_arguments_stand_for_a_function_of_a_library(optimizer, expected):
    rate = make_rate(RECIPE, "cosine")
    for found, wanted in zip(updates(make_optimizer(RECIPE, optimizer, None)), updates(expected(rate)), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_gradients_are_clipped_first():
    recipe = RECIPE._replace(clip=0.5)
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.lion(make_rate(recipe, "cosine")))
    np.testing.assert_array_equal(updates(make_optimizer(recipe, "lion", None)), updates(clipped))
    np.testing.assert_array_equal(updates(make_optimizer(recipe, None, None)), updates(recipe.optimizer()))


@pytest.mark.parametrize(
    ("decay", "warmup", "rates"),
    [
        # From a third, in 2 steps, to 0.1; then in 8 steps to 0.005.
        ("linear", 2, [0.1 / 3, 0.2 / 3, 0.1, 0.1 - 0.095 / 8, 0.005]),
        ("constant", 2, [0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.1]),
        ("cosine", 0, [0.1, 0.0976750, 0.0909283, 0.0804196, 0.005]),
    ],
)
def test_the_rate_rises_and_decays(decay, warmup, rates):
    rate = make_rate(RECIPE._replace(warmup=warmup), decay)
    assert [float(rate(step)) for step in (0, 1, 2, 3, 10)] == pytest.approx(rates, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_a_training_takes_it_on_every_mesh_and_goes_on(optimizer, tmp_path, capsys):
    """Losses within 1e-5 of one device's, relative; another rate is told when the run goes on."""
    text = tmp_path / "text.py"
    text.write_bytes(Path(__file__).read_bytes() * 3)
    tiny = ["--change", "depth=2,width=16,heads=2", "--batch", "8", "--seq", "8", "--steps", "3", "--sample", "0"]
    flags = [*tiny, "--data", str(text), "--optimizer", optimizer, "--warmup", "1", "--decay", "linear", "--clip", "1"]

    def train(*more):
        assert main(["train", *flags, *more, "--json", "-"]) == 0
        output = capsys.readouterr()
        return json.loads(output.out), output.err

    one, _ = train("--devices", "1")
    mesh = ["--mesh", "data=4,tensor=2", "--strategy", "zero2"]
    found, _ = train(*mesh, "--checkpoint", str(tmp_path / "run"))
    assert found["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert found["recipe"]["optimizer"] == optimizer and found["recipe"]["warmup"] == 1
    _, shown = train(*mesh, "--checkpoint", str(tmp_path / "run"), "--resume", "--decay", "constant")
    assert "note: the run so far had --decay linear, now it is constant: the learning rate changes" in shown
