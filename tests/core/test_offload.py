"""Optimizer state in the host's memory: what a layout says about it, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import Mesh

import jaxshard as js
from jaxshard.core.offload import check_host_memory


def init_fn(key: jax.Array) -> Any:
    return {"blocks": {"w": jnp.zeros((3, 128, 64))}, "head": jnp.zeros((64, 7)), "scale": jnp.zeros(())}


def layout_of(*more: Any) -> js.Layout:
    return js.layout(js.compose(js.fsdp(min_size=0), *more), js.make_mesh(data=8), init_fn, optax.adam(1e-3))


def test_state_alone_moves_to_the_host_and_its_bytes_with_it() -> None:
    here, there = layout_of(), layout_of(js.offload(min_size=0))
    state = here.bytes_per_device()["opt"]
    assert there.bytes_per_device() == here.bytes_per_device() | {"opt": 4}  # the count stays
    assert there.host_bytes_per_device() == state - 4 and here.host_bytes_per_device() == 0
    kinds = {x.memory for x in jax.tree.leaves((there.params, there.grads, there.opt_params))}
    assert kinds == {""} and there.opt_state[0].mu["blocks"] != there.opt_params["blocks"]
    assert "in the host's memory" in there.explain() and "on the host" in str(there)
    small = layout_of(js.offload())
    assert 0 <= small.host_bytes_per_device() < there.host_bytes_per_device()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="only optimizer state, 'opt', can be kept in the host's memory, got 'param'"):
        js.offload("param")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_size must be at least 0"):
        js.offload(min_size=-1)

    def everywhere(role: Any, leaf: Any, placement: js.Placement, mesh: Any) -> js.Placement:
        return js.Placement(placement.view, placement.use, placement.store, memory="pinned_host")

    with pytest.raises(ValueError, match="where only optimizer state can"):
        layout_of(everywhere)


def test_devices_without_that_memory_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(device_kind="Abacus", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh = SimpleNamespace(devices=np.array([device], object))
    with pytest.raises(
        ValueError, match=r"Abacus devices have no memory 'pinned_host', only 'device'; leave js\.offload"
    ):
        check_host_memory(mesh)  # type: ignore[arg-type]
    check_host_memory(Mesh(np.array(jax.devices()), "data"))


@pytest.mark.slow
def test_matrices_that_rest_with_owners_are_refused() -> None:
    strategy = js.compose(js.fsdp(min_size=0), js.offload(min_size=0))
    with pytest.raises(ValueError, match=r"this optimizer multiplies matrices, .* leave js\.offload out"):
        js.layout(strategy, js.make_mesh(data=8), init_fn, optax.contrib.muon(1e-3))
