"""The recorded loss curves of the default training under every strategy, and the pictures that are made from them."""

import json
from pathlib import Path

import pytest

from jaxshard.models import SIZES
from tests.benchmarks.scripts import script

ROOT = Path(__file__).parents[2]


curves = script("curves")


def test_the_recorded_curves_are_those_of_the_default_training_and_agree(curves):
    recorded = json.loads(curves.RECORDED.read_text())
    runs = recorded["runs"]
    assert list(runs) == list(curves.RUNS) and len(runs) == 8
    assert {name: tuple(run["flags"]) for name, run in runs.items()} == curves.RUNS
    assert recorded["model"] == "gpt-1m"
    assert recorded["recipe"] == SIZES["gpt-1m"].recipe._asdict() | {"steps": curves.STEPS}
    for name, run in runs.items():
        assert len(run["loss"]) == curves.STEPS, name
        assert run["loss"][0] > 5 > 2.5 > run["loss"][-1], name  # it has learned something
        assert curves.spread(recorded, name) <= recorded["allowed"] == 1e-4, name
    assert curves.to_json(recorded) == curves.RECORDED.read_text()
    largest = max(curves.spread(recorded, name) for name in runs)
    assert f"at most {largest:.1e} from one device".replace("e-0", "e-") in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("look", ["light", "dark"])
def test_the_pictures_name_the_curves_that_they_show(curves, look):
    picture = (curves.PICTURES / f"loss_curves_{look}.svg").read_text()
    assert curves.source_of(curves.RECORDED.read_bytes()) in picture, "python benchmarks/curves.py --draw"
    assert f"docs/pictures/loss_curves_{look}.svg" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_pictures_are_made_from_a_record(curves, tmp_path):
    pytest.importorskip("matplotlib")
    losses = {"one device": [3.0, 2.0], "fsdp": [3.0, 2.002]}
    file = tmp_path / "curves.json"
    file.write_text(curves.to_json({"allowed": 1e-4, "runs": {name: {"loss": loss} for name, loss in losses.items()}}))
    recorded = json.loads(file.read_text())
    assert curves.spread(recorded, "fsdp") == pytest.approx(1e-3) and recorded["allowed"] == 1e-4
    curves.draw(file, tmp_path / "pictures")
    light, dark = ((tmp_path / "pictures" / f"loss_curves_{look}.svg").read_text() for look in ("light", "dark"))
    assert light.startswith("<?xml") and light != dark
    assert all(curves.source_of(file.read_bytes()) in picture for picture in (light, dark))
