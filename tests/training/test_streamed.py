"""Steps whose optimizer's state rests in the host's memory: the same numbers, and state that stays there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params

import jaxshard as js
from jaxshard.core.jaxpr import open_jaxpr
from tests.toys import gpt_toy


def train(tx: Any, strategy: js.Strategy, steps: int = 2) -> tuple[Any, js.TrainState, js.Layout, js.Step]:
    toy = gpt_toy()
    layout = js.layout(strategy, js.make_mesh(data=8), toy.init_fn, tx)
    run, step = js.init(toy.init_fn, tx, layout, 0), js.make_step(toy.loss_fn, tx, layout)
    for _ in range(steps):
        run, _ = step(run, toy.batch)
    return js.logical(run, layout), run, layout, step


def kinds(run: js.TrainState) -> set[str]:
    return {str(x.sharding.memory_kind) for x in jax.tree.leaves(run.opt_state) if x.ndim}


@pytest.mark.parametrize(
    ("tx", "how"),
    [
        pytest.param(optax.adamw(1e-2, eps=1e-3), "block by block", marks=pytest.mark.slow),
        pytest.param(js.optim.adam8bit(1e-2, eps=1e-3), "whole", marks=pytest.mark.slow),
        pytest.param(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3)), "whole", marks=pytest.mark.slow
        ),
    ],
)
def test_parameters_and_state_are_those_of_state_on_the_device_within_1e_6(tx: Any, how: str) -> None:
    split = js.fsdp(min_size=0)
    here, run, _, _ = train(tx, split)
    there, offloaded, _, step = train(tx, js.compose(split, js.offload(min_size=0)))
    assert kinds(run) == {"device"} and kinds(offloaded) == {"pinned_host"}
    assert how in step.update_view and "come from the host's memory" in step.update_view
    for one, other in zip(jax.tree.leaves(there.params), jax.tree.leaves(here.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert jax.tree.map(np.shape, there.opt_state) == jax.tree.map(np.shape, here.opt_state)


def loops(jaxpr: Any) -> set[int]:
    """The turns of all loops of a program."""
    here = {e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"}
    return here.union(*(loops(open_jaxpr(one)[0]) for e in jaxpr.eqns for one in jaxprs_in_params(e.params)))


@pytest.mark.parametrize(("split", "stacked"), [(js.fsdp(min_size=0), True), (js.ddp(), False)])
def test_only_stacked_blocks_come_one_at_a_time(split: js.Strategy, stacked: bool) -> None:
    """Turns of loops as literals: 3 of the blocks [3, 8, 16]; none of embed [1003, 16], bias [77] and the scalar."""

    def init_fn(key: jax.Array) -> Any:
        rest = {"embed": jnp.ones((1003, 16)), "bias": jnp.ones(77), "scale": jnp.ones(())}
        return rest | ({"blocks": {"w": jnp.ones((3, 8, 16))}} if stacked else {})

    def loss_fn(params: Any, batch: Any, key: Any) -> js.Mean:
        total = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        return js.Mean(total * jnp.sum(batch["x"]), batch["x"].shape[0])

    tx = optax.adam(1e-2)
    layout = js.layout(js.compose(split, js.offload(min_size=0)), js.make_mesh(data=8), init_fn, tx)
    run, step = js.init(init_fn, tx, layout, 0), js.make_step(loss_fn, tx, layout)
    traced = jax.make_jaxpr(step)(run, {"x": jax.ShapeDtypeStruct((8,), np.float32)})
    assert loops(traced.jaxpr) == ({3} if stacked else set())
    assert ("stacked arrays block by block, others whole" in step.update_view) == stacked


@pytest.mark.slow
def test_a_bad_step_changes_nothing_and_checkpoints_know_no_memory(tmp_path: Path) -> None:
    """Exact: saved with state on the host, restored with state on the device, and the other way round."""
    tx, toy = optax.adam(1e-2), gpt_toy()
    split = js.fsdp(min_size=0)
    _, run, layout, step = train(tx, js.compose(split, js.offload(min_size=0)))
    js.save(tmp_path / "run", run, layout)
    before = jax.device_get(run)
    bad = toy.batch | {"weights": np.full_like(toy.batch["weights"], np.nan)}
    run, metrics = step(run, bad)
    assert metrics["bad"]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((run.params, run.opt_state)), before[1:3])
    other = js.layout(split, js.make_mesh(data=8), toy.init_fn, tx)
    restored = js.restore(tmp_path / "run", other)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored.opt_state), before.opt_state)
    assert kinds(restored) == {"device"}
    js.save(tmp_path / "other", restored, other)
    back = js.restore(tmp_path / "other", layout)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back.opt_state), before.opt_state)
    assert kinds(back) == {"pinned_host"}


@pytest.mark.slow
def test_compiled_for_tpus_the_state_leaves_the_device() -> None:
    """v5e:4x4, 12 stacked blocks: its bytes go from the arguments, and the peak falls by most of them."""
    pytest.importorskip("libtpu")
    model = js.models.gpt(vocab=256, width=512, depth=12, heads=8, seq=128)
    mesh, tx = js.plan.topology_mesh("v5e:4x4", data=16), optax.adam(1e-3)
    batch = {"tokens": jax.ShapeDtypeStruct((16, 129), np.int32)}
    found = []
    for more in ((), (js.offload(),)):
        layout = js.layout(js.compose(js.fsdp(), *more), mesh, model.init, tx)
        compiled = js.make_step(model.loss, tx, layout, engine=js.explicit()).compile(batch)
        found.append((layout, compiled.memory_analysis()))
    (_, here), (layout, there) = found
    state = layout.host_bytes_per_device()
    assert here.argument_size_in_bytes - there.argument_size_in_bytes >= 0.99 * state
    assert there.host_argument_size_in_bytes >= state
    on_device = there.peak_memory_in_bytes - there.host_argument_size_in_bytes  # the figure has what is on the host
    assert here.peak_memory_in_bytes - on_device >= 0.8 * state
