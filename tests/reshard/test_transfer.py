"""A run moved from any layout to any other has the same bits, and what does not fit is refused by name."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jaxshard as js
from jaxshard.training.state import run_arrays
from tests.reshard.cases import MODEL, TX, assert_holds, least_bytes, run_of, stored_values, values_of
from tests.reshard.recorder import Recorder, temporary_bytes

RULES = [("table", ("vocab", "embed")), ("w", ("embed", "mlp")), ("*", "whole"), *js.RULES]


def make_layout(name, first=0, tx=TX):
    """A layout over eight devices or fewer, from the device with this number on, around the end."""
    devices = [jax.devices()[(first + number) % 8] for number in range(8)]
    strategy, axes = {
        "one": (js.ddp("data"), {"data": 1}),
        "ddp": (js.ddp("data"), {"data": 4}),
        "zero1": (js.zero1("data", min_size=0), {"data": 8}),
        "zero2": (js.zero2("data", min_size=0), {"data": 2}),
        "fsdp": (js.fsdp("data", min_size=0), {"data": 4}),
        "wide": (js.fsdp("data", min_size=0), {"data": 8}),
        "hsdp": (js.hsdp("replica", "data", min_size=0), {"replica": 2, "data": 3}),
        "tensor": (js.compose(js.batch("data"), js.tensor(RULES)), {"data": 1, "tensor": 4}),
        "pipe": (js.compose(js.fsdp("data", min_size=0), js.pipeline(chunks=2)), {"data": 2, "pipe": 2}),
        "three": (
            js.compose(js.fsdp("data", min_size=0), js.tensor(RULES), js.pipeline(chunks=1)),
            {"data": 2, "tensor": 2, "pipe": 2},
        ),
    }[name]
    mesh = js.make_mesh(devices[: int(np.prod(list(axes.values())))], **axes)
    return js.layout(strategy, mesh, MODEL.init, tx)


def check(source, target):
    """Move a run, and compare its bits, and the planned bytes with those that are counted one by one."""
    values = values_of(source)
    run = run_of(source, values)
    moved = js.transfer(run, source, target)
    assert_holds(moved, stored_values(target, values))
    assert_holds(run, stored_values(source, values))
    (shapes, before), (_, after) = run_arrays(source), run_arrays(target)
    plan = js.plan_transfer(source, target)
    assert plan.bytes == least_bytes(source, target, shapes, before, after)
    assert plan.bytes == sum(plan.sent.values()) == sum(plan.received.values())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(("three", 0), ("tensor", 4), id="fsdp x tensor x pipe to tensor"),
        pytest.param(("fsdp", 0), ("tensor", 4), id="disjoint", marks=pytest.mark.slow),
        pytest.param(("wide", 0), ("wide", 4), id="other order", marks=pytest.mark.slow),
        pytest.param(("hsdp", 3), ("pipe", 0), id="six to four", marks=pytest.mark.slow),
        pytest.param(("pipe", 1), ("pipe", 0), id="pipelines", marks=pytest.mark.slow),
        pytest.param(("one", 0), ("ddp", 2), id="one to many", marks=pytest.mark.slow),
        pytest.param(("ddp", 0), ("ddp", 0), id="the same layout", marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_same_bits_and_the_permutes_have_the_least_bytes(source, target, monkeypatch):
    recorder, source, target = Recorder(monkeypatch), make_layout(*source), make_layout(*target)
    check(source, target)
    plan = js.plan_transfer(source, target)
    assert recorder.bytes_sent() == plan.bytes
    for device, most in recorder.most.items():
        assert most <= plan.peak[device]
    assert max(temporary_bytes(call.program) for call in recorder.calls) <= plan.limit


NAMES = ("one", "ddp", "zero1", "zero2", "fsdp", "wide", "hsdp", "tensor", "pipe", "three")


@pytest.mark.slow
@hypothesis.settings(max_examples=20, derandomize=True)
@hypothesis.given(*[st.tuples(st.sampled_from(NAMES), st.integers(0, 7))] * 2)
def test_random_pairs_of_layouts(source, target):
    check(make_layout(*source), make_layout(*target))
