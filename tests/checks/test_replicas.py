"""Copies that must be equal: which arrays have some, who is named where one differs, and what a comparison costs."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.checks import replicas as module
from jaxshard.checks.replicas import (
    BitSums,
    Watched,
    find_differences,
    list_watched,
    sums_program,
)
from jaxshard.core.tree import Leaf
from jaxshard.hlo.found import collectives
from tests.checks.flips import flipped, flipped_copies
from tests.engines.programs import tpu
from tests.optim.owners.shampoo import shampoo
from tests.toys import normal


def init_fn(key):
    return js.Model({"dense": {"kernel": normal(0, 16, 24), "bias": jnp.zeros(24)}}, {"mean": jnp.zeros(24)})


def loss_fn(model, batch, key):
    y = batch["x"] @ model.params["dense"]["kernel"] + model.params["dense"]["bias"]
    state = {"mean": 0.9 * model.state["mean"] + 0.1 * y.mean(axis=0)}
    return js.Loss(js.Mean((y**2).sum(), y.size), state=state)


TX = optax.adam(1e-2)
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
STRATEGIES = {
    "ddp": (js.ddp("data"), {"data": 8}),
    "zero2": (js.zero2("data", min_size=0), {"data": 8}),
    "fsdp": (js.fsdp("data", min_size=0), {"data": 8}),
    "hsdp": (js.hsdp("replica", "data", min_size=0), {"replica": 2, "data": 4}),
}


@cache
def made(name):
    """A layout, its step, and a run after a step."""
    strategy, axes = STRATEGIES[name]
    layout = js.layout(strategy, js.make_mesh(**axes), init_fn, TX)
    step = js.make_step(loss_fn, TX, layout, engine=js.explicit(), donate=False)
    return layout, step, js.init(init_fn, TX, layout, 0)


SCALARS = {"step", "key", "opt_state/0/count", "state/mean"}
PARAMS = {"params/dense/kernel", "params/dense/bias"}
MOMENTS = {f"opt_state/0/{moment}/dense/{name}" for moment in ("mu", "nu") for name in ("kernel", "bias")}


@pytest.mark.parametrize(
    ("name", "watched"),
    [
        ("ddp", SCALARS | PARAMS | MOMENTS),
        ("zero2", SCALARS | PARAMS),
        ("fsdp", SCALARS),
        ("hsdp", SCALARS | PARAMS | MOMENTS),
    ],
)
def test_every_array_with_copies_is_watched(name, watched):
    strategy, axes = STRATEGIES[name]
    layout = js.layout(strategy, js.make_mesh(**axes), init_fn, TX)
    assert {one.leaf.path for one in list_watched(layout)} == watched


def test_bytes_are_those_of_a_devices_own_copies():
    layout = made("hsdp")[0]
    words = 16 * 24 + 24
    assert js.ReplicaWatch(layout).bytes == 4 * 3 * words // 4 + 4 * 24 + 4 + 4 + 8
    assert js.ReplicaWatch(layout).arrays == 10


@pytest.mark.parametrize(
    ("sums", "odd"),
    [([7, 7, 7, 7], []), ([7, 7, 1, 7], [2]), ([7, 1, 2, 7], [0, 1, 2, 3]), ([7, 7, 1, 1], [0, 1, 2, 3]),
     ([5, 7, 7, 7], [0])],
)  # fmt: skip
def test_the_majority_decides(sums, odd):
    mesh = js.make_mesh(jax.devices()[:4], data=4)
    watched = [Watched(0, Leaf("w", (3,), "float32", ()), P(None), 12)]
    found = find_differences(mesh, watched, np.uint32(sums)[:, None])
    assert [[device.id for device in one.differ] for one in found] == ([odd] if odd else [])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["hsdp", "ddp"])
def test_a_flipped_bit_is_found_with_leaf_and_device(name):
    layout, step, run = made(name)
    run, _ = step(run, BATCH)
    js.check_replicas(run, layout)
    for number, path in enumerate(one.leaf.path for one in list_watched(layout)):
        wrong = flipped(run, path, device=number % 8, element=0, bit=number % 32)
        with pytest.raises(js.ReplicasDiffer) as caught:
            js.check_replicas(wrong, layout)
        (found,) = caught.value.differences
        assert found.leaf.path == path
        assert number % 8 in [device.id for device in found.differ]
        assert len(found.differ) == (1 if len(found.copies) == 8 else 2)
        assert flipped_copies(wrong) == {path}
        assert caught.value.step == (None if path == "step" else 1)


def test_factors_that_live_with_owners_are_watched():
    """Of two groups of four devices each has an owner of every matrix: two copies of its factors."""
    tx, init_fn = shampoo(0.1), lambda key: {f"w{i}": jnp.ones((8, 8)) for i in range(4)}
    layout = js.layout(js.hsdp("replica", "data", min_size=0), js.make_mesh(replica=2, data=4), init_fn, tx)
    run = js.init(init_fn, tx, layout, 0)
    js.check_replicas(run, layout)
    with pytest.raises(js.ReplicasDiffer) as caught:
        js.check_replicas(flipped(run, "opt_state/left/w0", device=6, element=9, bit=3), layout)
    (found,) = caught.value.differences
    assert (found.leaf.path, found.leaf.shape) == ("opt_state/left/w0", (4, 8, 8))
    assert [device.id for device in found.copies] == [2, 6]


def test_the_message_names_arrays_devices_and_the_way_back():
    layout, _, run = made("ddp")
    wrong = flipped(run, "params/dense/bias", device=5, element=3, bit=31)
    watch = js.ReplicaWatch(layout, every=2)
    watch(2, run)
    with pytest.raises(js.ReplicasDiffer) as caught:
        watch(4, flipped(wrong, "key", device=5, element=0, bit=0))
    assert str(caught.value) == (
        "after step 4 copies of arrays that must be equal differ (device 5: 2 arrays)\n"
        "  - params/dense/bias float32[24], 8 copies: device 5 differs from the others\n"
        "  - key key<fry>[], 8 copies: device 5 differs from the others\n"
        "No later step can be trusted: start again from a checkpoint of step 2, the last found equal, or an "
        "earlier one."
    )
    layout, _, run = made("hsdp")
    with pytest.raises(js.ReplicasDiffer) as caught:
        js.check_replicas(flipped(run, "params/dense/kernel", device=1, element=0, bit=0), layout)
    assert "2 copies without a majority: device 1, device 5 differ from each other" in str(caught.value)
    assert str(caught.value).endswith("start again from an earlier checkpoint.")


def test_fit_ends_where_copies_differ():
    layout, step, run = made("ddp")
    seen = []

    def flips_at_three(run, batch):
        run, metrics = step(run, batch)
        return (flipped(run, "params/dense/kernel", device=3, element=9, bit=12) if run.step == 3 else run), metrics

    watch = js.ReplicaWatch(layout, every=2)
    on_run = [watch, lambda number, run: seen.append(number)]
    with pytest.raises(js.ReplicasDiffer, match=r"after step 4 .*device 3") as caught:
        js.fit(run, flips_at_three, [BATCH] * 8, steps=8, on_run=on_run)
    assert seen == [1, 2, 3] and caught.value.clean == 2 and watch.clean == 2
    watch = js.ReplicaWatch(layout, every=4)  # and the last run
    assert js.fit(run, step, [BATCH] * 6, steps=6, on_run=[watch]).step == 6 and watch.clean == 6


def test_on_accelerators_it_is_read_one_step_late_and_at_the_end(monkeypatch):
    layout, _, run = made("ddp")
    monkeypatch.setattr(module, "_one_at_a_time", lambda mesh: False)
    wrong = flipped(run, "step", device=0, element=0, bit=3)
    watch = js.ReplicaWatch(layout, every=2)
    watch(2, wrong)
    with pytest.raises(js.ReplicasDiffer, match="after step 2 "):
        watch(3, run)
    watch(4, run)
    assert watch.clean is None
    watch.wait()
    assert watch.clean == 4
    watch(6, wrong)
    with pytest.raises(js.ReplicasDiffer, match="step 4, the last found equal"):
        watch.finish(None)
    watch(8, wrong)
    watch.finish(ValueError())
    watch.finish()
    with pytest.raises(js.ReplicasDiffer, match="after step 5 "):
        js.fit(run, lambda run, batch: (wrong._replace(step=wrong.step), {"loss": jnp.float32(0)}), [BATCH] * 5,
               steps=5, on_run=[js.ReplicaWatch(layout, every=5)])  # fmt: skip


def test_the_program_has_no_collective_and_is_compiled_once():
    layout = made("hsdp")[0]
    sums = BitSums(layout.mesh, list_watched(layout))
    assert collectives(sums.program, layout.mesh) == () and sums.gather is None
    again = js.layout(*map(STRATEGIES["hsdp"].__getitem__, [0]), layout.mesh, init_fn, TX)
    made_once = module._make_sums(layout.mesh, list_watched(layout))
    assert module._make_sums(again.mesh, list_watched(again)) is made_once


def test_one_device_and_runs_of_other_layouts():
    layout = js.layout(js.ddp("data"), js.make_mesh(jax.devices()[:1], data=1), init_fn, TX)
    js.check_replicas(js.init(init_fn, TX, layout, 0), layout)
    assert js.ReplicaWatch(layout).arrays == 0
    ddp, hsdp = made("ddp"), made("hsdp")
    with pytest.raises(ValueError, match="have other shardings than the layout"):
        js.check_replicas(hsdp[2], ddp[0])
    with pytest.raises(ValueError, match="have other shardings than the layout"):
        js.ReplicaWatch(ddp[0])(10, hsdp[2])
    with pytest.raises(TypeError, match=r"must be a js\.TrainState"):
        js.check_replicas(hsdp[2].params, hsdp[0])
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        js.ReplicaWatch(ddp[0], every=0)


@tpu
@pytest.mark.slow
def test_the_tpu_compiler_reads_each_copy_once_and_copies_nothing():
    """3 GB of f32 and bf16: temporaries of 1 MB at most, and no collective."""

    def big(key):
        return {"a": jnp.zeros((16, 4096, 4096)), "b": jnp.zeros((4096, 11008), jnp.bfloat16)}

    layout = js.layout(js.ddp("data"), js.plan.topology_mesh("v5e:2x2", data=4), big, TX)
    compiled = sums_program(layout.mesh, list_watched(layout)).compile()
    held = js.ReplicaWatch(layout).bytes
    assert held > 3e9 and compiled.memory_analysis().temp_size_in_bytes < 2**20
    assert collectives(compiled, layout.mesh) == ()
    # More than once only where the compiler brings a part of them into its fast memory first.
    assert compiled.cost_analysis()["bytes accessed"] < 1.2 * held
