"""`jaxshard train --check-replicas`: says what it compares, and ends with names where copies differ."""

import re

import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.checks import replicas
from jaxshard.commands import train
from jaxshard.commands.main import main

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


def test_a_step_that_is_saved_is_compared_before(monkeypatch):
    """Also where the comparisons' interval does not divide that of the saves."""
    compared = []
    monkeypatch.setattr(train, "check_replicas", lambda run, layout: compared.append(run.step))
    layout = js.layout(js.ddp("data"), js.make_mesh(data=8), model, optax.sgd(0.1))
    run = js.init(model, optax.sgd(0.1), layout, 0)
    callbacks, shown = train._compare_copies(2, layout, (3, 4))
    for step in range(1, 10):
        for callback in callbacks:
            callback(step, run._replace(step=step) if callback is callbacks[1] else run)
    assert compared == [3, 9] and shown == {"replicas": "3 arrays, 268 B per device, compared every 2 steps"}
    assert train._compare_copies(None, layout, ()) == ([], {})
