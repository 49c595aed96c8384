"""Sums and gathers in which 8-bit numbers travel: what they compute, what they lose, and what moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core import collectives as native
from jaxshard.core.encoded_collectives import gather, list_scatter_sum, scatter_sum
from jaxshard.hlo.found import collectives

pytestmark = pytest.mark.fast_cases(3)

INT8 = js.wire.int8(block=16)
SPECS = {
    "reduce-scatter": ((24, 10), P("data"), {"data": 8}),
    "two levels": ((8, 30), P("data"), {"replica": 2, "data": 4}),
    "two dimensions": ((6, 20), P("y", "x"), {"x": 2, "y": 2}),
    "both axes along one": ((16, 3), P(("x", "y")), {"x": 2, "y": 4}),
    "whole": ((7, 11), P(None, None), {"replica": 2, "data": 4}),
    "a number": ((), P(), {"data": 8}),
    "nothing": ((8, 0), P("data"), {"data": 8}),
    "a few": ((8,), P("data"), {"data": 8}),
}


def on_devices(fn, x, out, axes):
    """What `fn` makes on each device of its own part of x, [devices, ...]; also the compiled program."""
    mesh = js.make_mesh(jax.devices()[: len(x)], **axes)
    body = jax.shard_map(lambda x: fn(x[0]), mesh=mesh, in_specs=P(tuple(axes)), out_specs=out, check_vma=False)
    compiled = jax.jit(body).lower(x).compile()
    return jax.tree.map(np.asarray, compiled(x)), collectives(compiled, mesh)


def shares(shape, axes, seed=0):
    count = int(np.prod(list(axes.values())))
    return np.random.default_rng(seed).normal(size=(count, *shape)).astype(np.float32)


@pytest.mark.parametrize("name", SPECS)
def test_the_sum_and_all_errors_are_the_exact_sum(name):
    """Each error is in the share of one device, at the number that it is about; nothing is counted twice."""
    shape, spec, axes = SPECS[name]
    x = shares(shape, axes)

    def fn(x):
        total, error = scatter_sum(x, spec, tuple(axes), INT8, x.dtype)
        return total, error[None]

    (total, errors), found = on_devices(fn, x, (spec, P(tuple(axes))), axes)
    assert total.shape == shape
    np.testing.assert_allclose(total + errors.sum(0), x.sum(0), atol=3e-6 * len(x))
    if x.size > 100:
        assert 0 < np.abs(errors).max() < 0.05 * np.abs(x).max() * len(x)
    listed = list_scatter_sum(shape, jnp.float32, spec, tuple(axes), axes, INT8, keep=())
    assert sorted((one.kind, one.axes, int(np.prod(one.shape))) for one in listed if np.prod(one.shape) > 1) == sorted(
        (one.kind, one.axes, int(np.prod(shape))) for one in found for shape in one.shapes if np.prod(shape) > 1
    )


@pytest.mark.parametrize("name", SPECS)
def test_a_gather_is_the_shards_rounded_once(name):
    shape, spec, axes = SPECS[name]
    x = shares(shape, {"one": 1})[0]

    def both(_):
        def local(whole):
            return gather(whole, spec, INT8)[None], native.gather(whole, spec)[None]

        whole = jnp.asarray(x)
        for dim, axis in native.split_dims(spec):
            whole = native.slice_shard(whole, dim, axis)
        return local(whole)

    (found, exact), _ = on_devices(both, shares((), axes), P(tuple(axes)), axes)
    np.testing.assert_array_equal(exact, np.broadcast_to(x, exact.shape))
    assert (found == found[0]).all()  # all devices have the same array
    np.testing.assert_allclose(found, exact, atol=np.abs(x).max(initial=0) / 250)
    if name != "a few" and x.size > 77:
        assert (found != exact).any()


def test_axes_of_one_device_move_and_round_nothing():
    x = shares((8, 4), {"data": 1})
    (total, error), found = on_devices(
        lambda x: scatter_sum(x, P("data"), ("data",), INT8, x.dtype), x, P("data"), {"data": 1}
    )
    np.testing.assert_array_equal(total, x[0])
    assert not error.any() and not found


@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_a_sum_of_what_is_not_finite_is_not_finite_and_its_error_is(odd):
    for spec in (P("data"), P(None)):
        x = shares((64,), {"data": 8})
        x[3, 40] = odd

        def fn(x, spec=spec):
            total, error = scatter_sum(x, spec, ("data",), INT8, x.dtype)
            return total, error[None]

        (total, errors), _ = on_devices(fn, x, (spec, P("data")), {"data": 8})
        assert not np.isfinite(total[40]) and np.isfinite(errors).all()
        assert np.isfinite(total[:40]).sum() >= 32  # the other blocks are as they were
