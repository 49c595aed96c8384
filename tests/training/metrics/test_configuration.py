"""The configuration of a run as plain values."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import optax

import jaxshard as js
from jaxshard.training.metrics.configuration import describe, flatten


class Point(NamedTuple):
    x: int


@dataclasses.dataclass
class Recipe:
    lr: float
    where: Path


def test_values_become_what_json_has_words_for():
    config = {"a": Point(1), "b": Recipe(0.5, Path("x")), "c": (None, True, [2]), 4: jnp.float32}
    assert describe(config) == {
        "a": {"x": 1},
        "b": {"lr": 0.5, "where": "x"},
        "c": [None, True, [2]],
        "4": str(jnp.float32),
    }


def test_a_layout_becomes_mesh_bytes_and_summary():
    layout = js.layout(
        js.fsdp("data", min_size=0), js.make_mesh(data=8), lambda key: {"w": jnp.zeros((64, 16))}, optax.sgd(1.0)
    )
    found = describe({"layout": layout})["layout"]
    assert found == {
        "mesh": {"data": 8},
        "devices": "8 x cpu",
        "bytes_per_device": {"param": 512, "grad": 512, "opt": 0, "state": 0},
        "summary": str(layout),
    }
    assert dict(flatten({"layout": found, "none": {}}))["layout.mesh.data"] == 8
