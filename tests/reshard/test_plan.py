"""A plan has the bytes and the memory of a transfer, from layouts alone."""

import math

import jax
import pytest

import jaxshard as js
from jaxshard.reshard.blocks import find_blocks
from jaxshard.training.state import run_arrays
from tests.reshard.cases import least_bytes, make_layout


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("three", 0), ("tensor", 4)),
        (("fsdp", 0), ("tensor", 4)),
        (("hsdp", 3), ("pipe", 0)),
        (("one", 0), ("wide", 0)),
        (("wide", 0), ("wide", 1)),
        (("ddp", 0), ("ddp", 2)),
    ],
)
def test_the_plan_has_the_least_bytes_and_a_peak_of_both_shards_and_a_block(source, target):
    source, target = make_layout(*source, tx=None), make_layout(*target, tx=None)
    (shapes, before), (_, after) = run_arrays(source), run_arrays(target)
    plan = js.plan_transfer(source, target)
    assert plan.bytes == least_bytes(source, target, shapes, before, after)
    assert plan.bytes == sum(plan.sent.values()) == sum(plan.received.values())
    largest = max(
        math.prod(block.shape) * move.dtype.itemsize
        for move in plan.moves
        for block in find_blocks(move.source, move.target)
    )
    narrow = target.params["blocks"]["w"].bytes_per_device(target.mesh, "bfloat16")  # copied on a CPU
    rest = 4 + jax.random.key_data(jax.random.key(0)).nbytes  # step and key
    for device, peak in plan.peak.items():
        both = sum(
            layout.bytes_per_device()["param"] + rest
            for layout in (source, target)
            if device in set(layout.mesh.devices.flat)
        )
        assert both < peak <= both + narrow + largest


def test_a_plan_prints_the_largest_figures_of_both_sides():
    text = str(js.plan_transfer(make_layout("fsdp", tx=None), make_layout("fsdp", 4, tx=None)))
    assert text.splitlines() == [
        "5 arrays, 940 B between devices in 7 rounds",
        "        at most per device:  sends  receives  stores   peak",
        "source  4 devices (data=4)   240 B       0 B   240 B  416 B",
        "target  4 devices (data=4)     0 B     240 B   240 B  416 B",
    ]
