"""Gathers and exchanges with a checksum: the bits that were sent, or NaN where other bits arrive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core import checked_moves as module
from jaxshard.core.checked_moves import CHECKED, checked_gather
from jaxshard.core.ordered_sums import ORDERED, PLAIN


def gathered(x, spec, keep=()):
    """What each of 8 devices receives, [2, 2, 2, *dims]."""
    mesh = js.make_mesh(a=2, b=2, c=2)

    def on_device(shard):
        return checked_gather(shard, spec, keep=keep)[None, None, None]

    run = jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=P("a", "b", "c"), check_vma=False)
    return np.asarray(jax.jit(run)(jax.device_put(x, NamedSharding(mesh, spec))))


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [(P("a", None), "float32"), (P(("a", "c"), "b"), "bfloat16"), (P(None, ("c", "b", "a")), "float32"),
     (P("b", None), "int32"), (P(), "float32")],
)  # fmt: skip
def test_it_gathers(spec, dtype):
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(jnp.dtype(dtype))
    assert (gathered(x, spec) == x).all()


def test_axes_that_go_on_splitting():
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    found = gathered(x, P(("a", "b"), "c"), keep=("a",))
    assert (found[0] == x[:4]).all() and (found[1] == x[4:]).all()


@pytest.mark.parametrize("bit", [0, 31])
def test_a_bit_that_changes_on_the_way_to_one_device(bit, monkeypatch):
    plain = module.gather

    def gather(x, spec, *, keep=()):
        whole = plain(x, spec, keep=keep)
        bits = lax.bitcast_convert_type(whole, jnp.uint32)
        is_wrong = lax.axis_index(("a", "b", "c")) == 5
        return lax.bitcast_convert_type(bits.at[3, 2].set(bits[3, 2] ^ (is_wrong.astype(jnp.uint32) << bit)), x.dtype)

    monkeypatch.setattr(module, "gather", gather)
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    found = gathered(x, P("b", ("a", "c"))).reshape(8, 8, 16)
    assert np.isnan(found[5]).all()
    assert (np.delete(found, 5, axis=0) == x).all()


def summed(sums, x, spec, axes):
    """The sum of the shares x [2, 2, 2, *dims] of 8 devices, as they hold it: [2, 2, 2, *shard]."""
    mesh = js.make_mesh(a=2, b=2, c=2)

    def on_device(share):
        return sums.scatter_sum(share[0, 0, 0], spec, axes)[None, None, None]

    whole = P("a", "b", "c")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return np.asarray(jax.jit(run)(jax.device_put(x, NamedSharding(mesh, whole))))


SUMS = [
    (P("a", None), ("a",), "float32"),
    (P("a", "b"), ("a", "b", "c"), "float32"),
    (P(), ("a", "b", "c"), "bfloat16"),
    (P(None, ("c", "b")), ("c", "a"), "float32"),
]


@pytest.mark.parametrize(("spec", "axes", "dtype"), SUMS)
def test_a_checked_sum_is_the_ordered_one_bit_for_bit(spec, axes, dtype):
    x = np.random.default_rng(0).normal(size=(2, 2, 2, 8, 12)).astype(jnp.dtype(dtype))
    assert (summed(CHECKED, x, spec, axes) == summed(ORDERED, x, spec, axes)).all()


def test_a_sum_of_fewer_numbers_than_devices():
    x = np.random.default_rng(0).normal(size=(2, 2, 2, 3)).astype(np.float32)
    assert (summed(CHECKED, x, P(), ("a", "b", "c")) == summed(ORDERED, x, P(), ("a", "b", "c"))).all()


@pytest.mark.parametrize("bit", [0, 22, 31])
@pytest.mark.parametrize(("spec", "axes"), [(P("a", None), ("a",)), (P(), ("a", "b", "c"))], ids=["scatter", "all"])
def test_a_bit_of_a_share_that_changes_on_the_way_to_one_device(bit, spec, axes, monkeypatch):
    def exchange(parts, axes):
        got = PLAIN.exchange(parts, axes)
        bits = lax.bitcast_convert_type(got, jnp.uint32).reshape(-1)
        is_wrong = lax.axis_index(("a", "b", "c")) == 5
        bits = bits.at[7].set(bits[7] ^ (is_wrong.astype(jnp.uint32) << bit)).reshape(got.shape)
        return lax.bitcast_convert_type(bits, got.dtype)

    x = np.random.default_rng(0).normal(size=(2, 2, 2, 8, 16)).astype(np.float32)
    monkeypatch.setattr(module, "PLAIN", PLAIN._replace(exchange=exchange))
    found = summed(CHECKED, x, spec, axes).reshape(8, -1)
    # Device 5 is a=1, b=0, c=1; of an exchange over "a" device 1 is the other one that knows of it.
    spoiled = {1, 5} if axes == ("a",) else set(range(8))
    assert {device for device in range(8) if np.isnan(found[device]).all()} == spoiled
    assert np.isfinite(np.delete(found, list(spoiled), axis=0)).all()
