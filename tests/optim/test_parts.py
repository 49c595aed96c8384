"""How arrays are split into parts: sizes for any shape, and the specs of parameters and of optimizer state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxshard import optim
from jaxshard.optim.parts import shard_shape, split_of

P = PartitionSpec
shapes = st.lists(st.integers(1, 20), max_size=3).map(tuple)


@given(shapes, st.sampled_from([1, 2, 3, 8, 256]))
@settings(max_examples=100, deadline=None)
def test_splits(shape: tuple[int, ...], parts: int) -> None:
    split = split_of(shape, parts)
    if not shape:
        assert split is None
        return
    assert split.local * parts >= split.size == shape[split.dim]
    assert parts == 1 or shard_shape(shape, parts) != shape, "a part can be told from its whole array"
    assert shard_shape(shard_shape(shape, parts), 1) == shard_shape(shape, parts)
    dividing = [size for size in shape if size % parts == 0]
    if dividing:
        assert split.size == max(dividing) and split.local * parts == split.size


def test_state_specs() -> None:
    params = {"w": jax.ShapeDtypeStruct((3, 16), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.float32)}
    tx = optim.averaged(optax.chain(optax.trace(0.9), optax.adam(0.1)), 0.9)
    expected = {"w": P(None, "data"), "b": P()}
    assert optim.param_specs(params, "data", 8) == expected
    assert optim.param_specs(params, ("x", "y"), 8)["w"] == P(None, ("x", "y"))
    for wrapped in (tx, optim.zero1(tx), optim.zero2(tx), optim.fsdp(tx)):
        specs = optim.state_specs(wrapped, params, "data", 8)
        assert specs.average == expected and specs.inner[0].trace == expected
        assert (adam := specs.inner[1][0]).mu == expected and adam.nu == expected and adam.count == P()
