"""`js.optim.diloco` in a user's own `shard_map` loop equals the plain loop on one device to 1e-5."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.optim.diloco import DilocoState
from tests.local_reference import MODEL, NESTEROV, batches, simulate

INNER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
STATES = DilocoState(P(), P(), P("replica"), P())


def make_loop(tx: Any, check_vma: bool) -> tuple[Any, Any]:
    """A loop over replica=2, data=2 whose parameters are [replicas, ...] outside."""
    mesh = js.make_mesh(jax.devices()[:4], replica=2, data=2)

    def step(params: Any, state: Any, rows: Any) -> tuple[Any, Any]:
        params, inner = jax.tree.map(lambda x: x[0], (params, state.inner))
        total = jax.lax.psum(rows["weights"].sum(), "data")

        def loss(params: Any) -> Any:
            return MODEL.loss(params, rows, jax.random.key(0)).totals[0] / total

        own = params if not check_vma else jax.lax.pcast(params, "data", to="varying")
        grads = jax.lax.psum(jax.grad(loss)(own), "data")
        updates, state = tx.update(grads, state._replace(inner=inner), params)
        params = optax.apply_updates(params, updates)
        params, inner = jax.tree.map(lambda x: x[None], (params, state.inner))
        return params, state._replace(inner=inner)

    specs = (P("replica"), STATES, P(("replica", "data")))
    loop = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=check_vma)
    shared = MODEL.init(jax.random.key(0))
    state = tx.init(shared)
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), (shared, state.inner))
    return jax.jit(loop), (twice[0], state._replace(inner=twice[1]))


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("check_vma", [True, False])
def test_two_replicas_in_two_fragments_equal_the_plain_loop_to_1e_5(check_vma: bool, warmup: int) -> None:
    # Rows that weigh as much on one replica as on the other, of which the warm-up knows no weights.
    given = [batch | {"weights": np.tile(batch["weights"][:8], 2)} for batch in batches(9)]
    tx = js.optim.diloco(INNER, every=4, outer=NESTEROV, fragments=2, warmup=warmup)
    loop, (params, state) = make_loop(tx, check_vma)
    for batch in given:
        params, state = loop(params, state, batch)
    shared, own, _ = simulate(INNER, NESTEROV, given, replicas=2, every=4, turns=(2, 0), warmup=warmup)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), state.shared, shared)
    for r in range(2):
        mine = jax.tree.map(lambda x: x[r], params)  # noqa: B023
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), mine, own[r])


@pytest.mark.slow
def test_the_only_collectives_over_replicas_are_the_all_reduces_in_the_conditional() -> None:
    loop, (params, state) = make_loop(js.optim.diloco(INNER, every=4, fragments=2), True)
    text = loop.lower(params, state, batches(1)[0]).compile()
    mesh = js.make_mesh(jax.devices()[:4], replica=2, data=2)
    found = [one for one in js.collectives(text, mesh) if "replica" in one.axes]
    assert [(one.kind, one.conditional, sum(one.sizes)) for one in found] == [
        ("all-reduce", True, 2688),  # 2 blocks of 16 x 16 and 16 numbers, embed [8, 16]
        ("all-reduce", True, 2240),  # 2 blocks and the head [16]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("check_vma, parameters", [(True, [4928]), (False, [])])
def test_in_the_warm_up_gradients_move_and_where_types_are_checked_parameters_too(
    check_vma: bool, parameters: list[int]
) -> None:
    loop, (params, state) = make_loop(js.optim.diloco(INNER, every=4, warmup=3), check_vma)
    text = loop.lower(params, state, batches(1)[0]).compile()
    mesh = js.make_mesh(jax.devices()[:4], replica=2, data=2)
    found = [one for one in js.collectives(text, mesh) if "replica" in one.axes]
    assert all(one.conditional and one.kind == "all-reduce" for one in found)
    # Gradients, the mean every 4 steps, and what the warm-up shares.
    assert sorted(sum(one.sizes) for one in found) == [4928, 4928, *parameters]


def test_bad_arguments_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="diloco: every must be a whole number from 1 on, got 0"):
        js.optim.diloco(INNER, every=0)
    with pytest.raises(ValueError, match="fragments=3 are synchronised one after the other within every=2 steps"):
        js.optim.diloco(INNER, every=2, fragments=3)
    with pytest.raises(TypeError, match="tx must be an optax GradientTransformation"):
        js.optim.diloco(optax.sgd, every=2)
    with pytest.raises(TypeError, match="tx must be an optax GradientTransformation"):
        js.local(every=2, outer=0.7)
    tx = js.optim.diloco(INNER, every=2)
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="update needs the replica's parameters"):
        tx.update(params, tx.init(params))
    layout = js.layout(js.ddp(), js.make_mesh(data=8), lambda key: params, tx)
    step = js.make_step(lambda params, batch, key: js.Mean((params["w"] * batch["x"]).sum(), 8.0), tx, layout)
    with pytest.raises(ValueError, match=r"diloco: update is not inside .* put js\.local\('replica', every="):
        step.lower({"x": jnp.ones((8, 3))})


def test_parameters_and_state_may_both_be_donated() -> None:
    params = {"w": jnp.ones(3)}
    state = js.optim.diloco(optax.sgd(0.1), every=2).init(params)
    doubled = jax.jit(lambda *x: jax.tree.map(lambda x: 2 * x, x), donate_argnums=(0, 1))(params, state)
    np.testing.assert_array_equal(doubled[1].shared["w"], 2)
