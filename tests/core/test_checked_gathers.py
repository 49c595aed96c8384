"""Gathers with a checksum: the bits that were sent, or NaN on the device where other bits arrive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core import checked_gathers as module
from jaxshard.core.checked_gathers import checked_gather


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
