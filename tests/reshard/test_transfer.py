"""A run moved from any layout to any other has the same bits, and what does not fit is refused by name."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.training.convert import convert_optimizer
from jaxshard.training.state import run_arrays
from tests.reshard.cases import MODEL, TX, assert_holds, least_bytes, make_layout, run_of, stored_values, values_of
from tests.reshard.recorder import Recorder, temporary_bytes


def check(source, target):
    """Move a run, compare its bits, and compare the planned bytes with a count of single elements."""
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
        pytest.param(("three", 0, None), ("tensor", 4, None), id="fsdp x tensor x pipe to tensor"),
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


@pytest.mark.slow
def test_a_mesh_and_a_transfer_guard_of_the_caller_change_nothing():
    source, target = make_layout("fsdp", tx=None), make_layout("tensor", 4, tx=None)
    values = values_of(source)
    run = run_of(source, values)
    for mesh in (source.mesh, target.mesh):
        with jax.transfer_guard("disallow"), jax.set_mesh(mesh):
            moved = js.transfer(run, source, target)
        assert_holds(moved, stored_values(target, values))


# Optimizer states, factors and model states of other kinds


@pytest.mark.slow
def test_the_optimizer_state_of_owners_moves():
    """Owners of matrices store stacks of states, which are compared as a layout without owners stores them."""

    def init(key):
        return {
            "a": np.zeros((8, 16), np.float32),
            "b": np.zeros((8, 16), np.float32),
            "c": np.zeros((4, 4), np.float32),
        }

    tx, strategy = optax.contrib.muon(0.1), js.fsdp("data", min_size=0)
    meshes = js.make_mesh(data=8), js.make_mesh(jax.devices()[4:], data=4)
    source, target = (js.layout(strategy, mesh, init, tx) for mesh in meshes)
    assert source.owners and target.owners
    values = values_of(source.without_owners)
    run = convert_optimizer(run_of(source.without_owners, values), source.without_owners, source)
    moved = convert_optimizer(js.transfer(run, source, target), target, target.without_owners)
    assert_holds(moved, stored_values(target.without_owners, values))


@pytest.mark.slow
def test_model_state_of_every_dtype_moves():
    dtypes = ("float16", "float8_e4m3fn", "float4_e2m1fn", "int8", "uint32", "bool", "complex64")

    def init(key):
        state = {dtype: jnp.zeros((8, 4), dtype) for dtype in dtypes} | {"keys": jax.random.split(key, 8)}
        return js.Model({"w": jnp.zeros((8, 4))}, state)

    split = js.compose(js.fsdp("data", min_size=0), js.shard("data", ["state"], min_size=0))
    check(*(js.layout(split, js.make_mesh(jax.devices()[:count], data=count), init, TX) for count in (2, 8)))


@pytest.mark.slow
def test_offloaded_optimizer_state_moves():
    strategy = js.compose(js.fsdp("data", min_size=0), js.offload())
    meshes = js.make_mesh(jax.devices()[:4], data=4), js.make_mesh(data=8)
    check(*(js.layout(strategy, mesh, MODEL.init, TX) for mesh in meshes))


@pytest.mark.slow
def test_the_factors_and_the_frozen_base_of_lora_move():
    tuned = js.lora(MODEL.init, MODEL.loss, rank=2, match=["table"])
    meshes = js.make_mesh(data=8), js.make_mesh(jax.devices()[:2], data=2)
    check(*(js.layout(js.fsdp("data", min_size=0), mesh, tuned.init, TX) for mesh in meshes))


@pytest.mark.slow
def test_a_layout_without_an_optimizer_takes_the_rest_and_parameters_move_alone():
    source, target = make_layout("three"), make_layout("tensor", 4, tx=None)
    values = values_of(source)
    run = run_of(source, values)
    expected = stored_values(target, values._replace(opt_state=None))
    assert_holds(js.transfer(run, source, target), expected)
    assert_holds(js.transfer(run.params, source, target), expected.params)
    assert js.plan_transfer(source, target).bytes < js.plan_transfer(source, make_layout("tensor", 4)).bytes


@pytest.mark.slow
def test_replicas_of_local_steps_move():
    made = [
        js.layout(js.compose(js.fsdp("data", min_size=0), js.local("replica", every=2)), mesh, MODEL.init, TX)
        for mesh in (js.make_mesh(replica=2, data=4), js.make_mesh(jax.devices()[3:7], replica=2, data=2))
    ]
    check(*made)


# Refusals


def test_what_does_not_fit_is_refused_by_name():
    source, elsewhere, target = (make_layout("fsdp", first, tx=None) for first in (0, 4, 2))
    run = run_of(source, values_of(source))
    with pytest.raises(ValueError, match=r"(?s)arrays of the run have other shardings.*params/table: NamedSharding"):
        js.transfer(run, elsewhere, target)
    with pytest.raises(ValueError, match=r"(?s)arrays of the tree of parameters have other.*table: NamedSharding"):
        js.transfer(run.params, elsewhere, target)
    with pytest.raises(TypeError, match=r"run must be a js\.TrainState"):
        js.transfer(None, source, target)
    with pytest.raises(TypeError, match=r"write js\.plan_transfer\(source_layout, target_layout\)"):
        js.plan_transfer(run, source)
    with pytest.raises(ValueError, match=r"residuals of gradients.*run\._replace\(residuals=\(\)\)"):
        js.transfer(run._replace(residuals=run.params), source, target)
    with pytest.raises(ValueError, match=r"(?s)leave the optimizer's state out.*trace/table: missing, expected"):
        js.plan_transfer(source, make_layout("ddp", 4))
    other = js.layout(js.ddp("data"), js.make_mesh(data=8), lambda key: {"table": np.zeros((16, 9), np.float32)})
    with pytest.raises(
        ValueError, match=r"(?s)other arrays than the target.*expected float32\[16, 9\], got float32\[16, 8"
    ):
        js.transfer(run, source, other)
    planned = js.layout(js.ddp("data"), js.plan.planned_mesh("v5e:2x2", data=-1), MODEL.init)
    with pytest.raises(ValueError, match=r"mesh \(data=4\) is of planned devices.*js\.make_mesh to run"):
        js.plan_transfer(source, planned)
    run.params["table"].delete()
    with pytest.raises(ValueError, match=r"arrays of this run were donated to an earlier step.*params/table"):
        js.transfer(run, source, target)
    with pytest.raises(ValueError, match=r"arrays of the parameters were donated.*table"):
        js.transfer(run.params, source, target)
