"""`jaxshard train --check-replicas`: says what it compares, and ends with names where copies differ."""

import re

import jax
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.checks import replicas
from jaxshard.commands.main import main
from jaxshard.commands.replicas import make_copies
from jaxshard.commands.saving import Saving

TINY = ["train", "--batch", "8", "--seq", "8", "--sample", "0", "--devices", "8", "--steps", "6", "--vocab", "32"]


def model(key):
    return {"w": np.zeros((8, 8), np.float32)}


@pytest.mark.slow
def test_train_compares_copies_and_saves_none_that_differ(tmp_path, capsys, monkeypatch):
    file, folder = tmp_path / "tokens.npy", tmp_path / "run"
    np.save(file, np.random.default_rng(0).integers(0, 32, 5000, np.uint8))
    flags = [*TINY, "--data", str(file), "--strategy", "zero2", "--check-replicas", "2"]
    assert main(flags) == 0
    assert re.search(r"replicas +\d+ arrays, [\d.]+ .?B per device, compared every 2 steps", capsys.readouterr().out)

    find, calls = replicas.find_differences, []

    def find_at_the_second(mesh, watched, rows):
        calls.append(rows)
        rows = np.array(rows)
        rows[5, 0] ^= len(calls) == 2
        return find(mesh, watched, rows)

    monkeypatch.setattr(replicas, "find_differences", find_at_the_second)
    assert main([*flags, "--checkpoint", str(folder), "--checkpoint-every", "2"]) == 1
    error = capsys.readouterr().err
    assert "jaxshard: after step 4 copies of arrays that must be equal differ (device 5: 1 array)" in error
    assert "start again from a checkpoint of step 2, the last found equal" in error and "Traceback" not in error
    assert js.latest_step(folder) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--check-replicas", "4"],
            "--check-replicas 4 does not divide --checkpoint-every 10: steps would be saved whose copies were not "
            "compared; give --checkpoint-every 12, or --check-replicas 1",
        ),
        (["--check-replicas", "5", "--memory-every", "1"], "give --memory-every 5, or --check-replicas 1"),
    ],
)
def test_steps_that_would_be_saved_unseen_are_refused(flags, message, tmp_path):
    layout = js.layout(js.ddp("data"), js.make_mesh(data=8), model, optax.sgd(0.1))
    numbers = dict(zip(flags[::2], map(int, flags[1::2]), strict=True))
    saves = Saving(tmp_path, memory_every=numbers.get("--memory-every"))
    with pytest.raises(ValueError, match=re.escape(message)):
        make_copies(numbers["--check-replicas"], layout, saves)


def test_a_run_that_is_saved_nowhere_is_compared_at_any_step():
    layout = js.layout(js.ddp("data"), js.make_mesh(data=8), model, optax.sgd(0.1))
    copies = make_copies(7, layout, Saving())
    assert copies.shown == {"replicas": "3 arrays, 268 B per device, compared every 7 steps"}
    assert len(copies.callbacks) == 2 and make_copies(None, layout, Saving()).callbacks == []
    alone = js.layout(js.ddp("data"), js.make_mesh(jax.devices()[:1], data=1), model, None)
    assert "nothing to compare" in make_copies(7, alone, Saving()).shown["replicas"]
