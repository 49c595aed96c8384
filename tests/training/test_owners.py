"""Muon and Shampoo with owners on eight devices against one device: 1e-5, and two all-to-alls, as literals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxshard as js
from jaxshard.core.tree import path_str
from tests.optim.owners.shampoo import shampoo
from tests.optim.owners.soap import soap

D = 32
STEPS = 2


def _matrices(key: jax.Array) -> Any:
    keys = jax.random.split(key, 2)
    return {f"w{i}": jax.random.normal(keys[i], (D, D)) for i in range(2)} | {"b": jnp.zeros(D)}


def _stacked(key: jax.Array) -> Any:
    keys = jax.random.split(key, 3)
    blocks = {"q": jax.random.normal(keys[0], (3, D, D)), "up": jax.random.normal(keys[1], (3, D, 40))}
    return {"blocks": blocks | {"b": jnp.zeros((3, D))}, "embed": jax.random.normal(keys[2], (41, D))}


def _loss(params: Any, batch: Any, key: jax.Array) -> js.Mean:
    """Linear in the parameters, with random coefficients, and a little curved: gradients of full rank."""
    total, count = 0.0, batch["x"].shape[0]
    for number, x in enumerate(jax.tree.leaves(params)):
        direction = jax.random.normal(jax.random.fold_in(jax.random.key(0), number), x.shape)
        total += jnp.vdot(x, direction) + 0.05 * jnp.sum(x**2)
    return js.Mean(count * total + batch["x"].sum(), count)


def _muon() -> Any:
    return optax.chain(optax.clip_by_global_norm(1.0), contrib.muon(0.1, weight_decay=0.1))


def _dims(params: Any) -> Any:
    numbers = contrib.MuonDimensionNumbers
    return jax.tree.map(lambda x: {2: numbers(0, 1), 3: numbers(1, 2)}.get(x.ndim), params)


CASES: dict[str, tuple[Callable[[jax.Array], Any], Callable[[], Any], dict[str, int], Callable[[], Any]]] = {
    "muon": (_matrices, _muon, {"data": 2}, lambda: js.fsdp(min_size=0)),
    "shampoo": (_matrices, lambda: shampoo(0.1), {"data": 2}, lambda: js.fsdp(min_size=0)),
    "per block": (
        _stacked,
        lambda: js.optim.per_block(contrib.muon(0.1)),
        {"data": 8},
        lambda: js.zero1(min_size=0),
    ),
    "dimension numbers": (
        _stacked,
        lambda: contrib.muon(0.1, muon_weight_dimension_numbers=_dims),
        {"data": 4, "tensor": 2},
        lambda: js.compose(js.zero2(min_size=0), js.shard("tensor", ["opt"], min_size=0)),
    ),
    "per block shampoo": (
        _stacked,
        lambda: js.optim.per_block(shampoo(0.1)),
        {"replica": 2, "data": 4},
        lambda: js.hsdp(min_size=0),
    ),
    "per block soap": (
        _stacked,
        lambda: js.optim.per_block(soap(0.1, eps=0.1)),
        {"data": 8},
        lambda: js.fsdp(min_size=0),
    ),
}


def _run(name: str) -> tuple[js.Layout, js.Step, js.TrainState, Any]:
    init_fn, make, axes, strategy = CASES[name]
    tx, mesh = make(), js.make_mesh(jax.devices()[: math.prod(axes.values())], **axes)
    layout = js.layout(strategy(), mesh, init_fn, tx)
    step = js.make_step(_loss, tx, layout)
    run, batch = js.init(init_fn, tx, layout, 0), {"x": np.ones(8, np.float32)}
    for _ in range(STEPS):
        run, _ = step(run, batch)
    return layout, step, run, batch


def _one_device(name: str, start: Any, batch: Any) -> tuple[Any, Any]:
    tx = CASES[name][1]()

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda params: _loss(params, batch, jax.random.key(0)).value)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = start, tx.init(start)
    for _ in range(STEPS):
        params, state = step(params, state)
    return params, state


def _without_basis(path: str, x: np.ndarray) -> np.ndarray:
    """Of SOAP's state what no rotation changes: eigenvectors of near eigenvalues depend on rounding."""
    if x.ndim >= 2 and path.endswith("/basis"):
        return x @ x.swapaxes(-1, -2)
    return x.sum(-2) if x.ndim >= 2 and path.endswith("/square") else x


def _check_equals_one_device(name: str, layout: js.Layout, run: js.TrainState, batch: Any) -> js.TrainState:
    seen, start = js.logical(run, layout), CASES[name][0](jax.random.key(0))
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path((seen.params, seen.opt_state)),
        jax.tree.leaves(_one_device(name, start, batch)),
        strict=True,
    ):
        x, y = (_without_basis(path_str(path), np.asarray(one)) for one in (x, y))
        scale = max(np.abs(np.asarray(y)).max(), 1e-3)
        np.testing.assert_allclose(np.asarray(x) / scale, np.asarray(y) / scale, atol=1e-5, err_msg=path_str(path))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_matrices_with_owners_are_updated_as_on_one_device(name: str, tmp_path: Path) -> None:
    """1e-5; and what was saved is restored bit for bit under another strategy, where nothing has an owner."""
    layout, step, run, batch = _run(name)
    assert layout.owners is not None and step.owned
    seen = _check_equals_one_device(name, layout, run, batch)
    js.save(tmp_path, run, layout)
    plain = js.layout(js.ddp(tuple(layout.mesh.shape)), layout.mesh, CASES[name][0], CASES[name][1]())
    assert plain.owners is None
    for other in (plain, layout, layout.without_owners):
        restored = js.logical(js.restore(tmp_path, other), other)
        for x, y in zip(jax.tree.leaves(seen.opt_state), jax.tree.leaves(restored.opt_state), strict=True):
            np.testing.assert_array_equal(x, y)


def test_one_all_to_all_brings_gradients_and_one_takes_updates_back() -> None:
    """Muon: 1e-5 of one device."""
    layout, step, run, batch = _run("muon")
    _check_equals_one_device("muon", layout, run, batch)
    moved = [
        (one.kind, one.axes, one.bytes)
        for one in js.collectives(step.compile(batch), layout.mesh)
        if one.kind == "all-to-all"
    ]
    assert moved == [("all-to-all", ("data",), D * D * 4)] * 2  # a half of the parameters each
    assert str(layout.owners) == (
        "owners of whole matrices:\n  w0 and 1 more: 2 matrices [32, 32], 1 on each of 2 devices of data"
    )
    assert layout.owners is not None and layout.owners.owner_of("w1") == (1,)
    promised = [one for one in js.plan.promise(layout, step.engine, _loss, batch).expected if one.kind == "all-to-all"]
    assert [(one.axes, one.shape, one.what) for one in promised] == [
        (("data",), (2, D * D // 2), "matrices to their owners"),
        (("data",), (2, D * D // 2), "updates from the owners"),
    ]


def test_a_layout_of_an_elementwise_optimizer_or_without_split_state_has_no_owners() -> None:
    mesh = js.make_mesh(data=8)
    for strategy, tx in (
        (js.fsdp(min_size=0), optax.adamw(1e-3)),
        (js.ddp(), _muon()),
        (js.fsdp(min_size=0), optax.lamb(1e-3)),
    ):
        assert js.layout(strategy, mesh, _matrices, tx).owners is None


def test_blocks_of_a_pipeline_have_no_owners_and_are_named() -> None:
    def init(key: jax.Array) -> Any:
        return {"embed": jnp.ones((16, 16)), "block": {"w": jnp.ones((16, 16))}, "head": jnp.ones((16, 16))}

    model = js.Stacked(lambda *a: None, lambda *a: None, lambda *a: None, num_blocks=4, init=init)
    tx, strategy = js.optim.per_block(contrib.muon(0.1)), js.compose(js.fsdp(min_size=0), js.pipeline())
    layout = js.layout(strategy, js.make_mesh(data=4, pipe=2), model.init, tx)
    assert str(layout.owners) == (
        "owners of whole matrices:\n"
        "  embed and 1 more: 2 matrices [16, 16], 0 to 1 on each of 4 devices of data, 2 of 4 places empty\n"
        "  blocks/w has no owner: its blocks are in the order of a pipeline"
    )
