"""What Flax may change without an error: each entry of adapt/compat.py still is what it is taken for.

A test fails by the name of what changed. Imports and attributes fail loudly, in every other test.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

from jaxshard.adapt import compat

NAMES = ("embed", "mlp")


class Counter(nn.Module):
    """Counts its calls, but not those of initialisation."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("seen", "calls", jnp.zeros, (), jnp.int32)
        if not self.is_initializing():
            count.value += 1
        self.sow("intermediates", "x", x)
        return nn.Dense(2)(x)


def test_the_flag_initializing_is_what_is_initializing_reads():
    x, key = jnp.ones((1, 3)), jax.random.key(0)
    _, made = compat.initialize_through(Counter(), lambda module: module(x), {}, key, ["intermediates"])
    assert made["seen"]["calls"] == 0, 'Flax has another name than "initializing" for the flag of Module.init'
    assert set(made) == {"params", "seen"}
    assert jnp.array_equal(made["params"]["Dense_0"]["kernel"], Counter().init(key, x)["params"]["Dense_0"]["kernel"])


@pytest.mark.parametrize("make", [nn.with_partitioning, nn.with_logical_partitioning])
def test_names_in_linen_boxes(make):
    module = nn.Dense(2, kernel_init=make(nn.initializers.ones, NAMES))
    boxed = module.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    assert compat.names_in_boxes(boxed) == {("kernel",): NAMES}, f"{make.__name__} makes no nn.Partitioned"


def test_names_in_the_metadata_of_nnx_variables():
    init = nnx.with_partitioning(nnx.initializers.ones, NAMES)
    with compat.without_eager_placement():
        kernel = nnx.Linear(3, 2, kernel_init=init, rngs=nnx.Rngs(0)).kernel
    assert compat.names_of_variable(kernel) == NAMES, f"the names are not found in {kernel.get_metadata()}"
    assert compat.names_of_variable(nnx.Param(jnp.ones(3))) == ()


@pytest.mark.parametrize("key", ["out_sharding", "sharding", "sharding_names"])
def test_names_under_each_key_that_flax_has_used(key):
    class Variable:
        def get_metadata(self):
            return {key: PartitionSpec(*NAMES)}

    assert compat.names_of_variable(Variable()) == NAMES


def test_names_of_dimensions_are_not_looked_up_among_mesh_axes():
    def make():
        init = nnx.with_partitioning(nnx.initializers.ones, NAMES)
        return nnx.Linear(3, 2, kernel_init=init, rngs=nnx.Rngs(0))

    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])), compat.without_eager_placement():
        assert make().kernel.shape == (3, 2)


def test_calls_of_instances_are_intercepted():
    module = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.LayerNorm(3, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    expected = module(jnp.ones((1, 3)))
    ran = []

    def around(unit, call, args, kwargs):
        ran.append(type(unit))
        return call(*args, **kwargs)

    seen = []
    compat.intercept_calls(module, (nnx.Linear,), lambda path, unit: seen.append(path) or around)
    assert seen == [("layers", 0)]
    assert jnp.array_equal(module(jnp.ones((1, 3))), expected)
    assert [issubclass(kind, nnx.Linear) for kind in ran] == [True]
    paths = [[path for path, _ in nnx.to_flat_state(one)] for one in (nnx.split(module)[1], state)]
    assert paths[0] == paths[1], "the interceptor became a variable"
    copy = nnx.merge(*nnx.split(module), copy=True)
    assert jnp.array_equal(copy(jnp.ones((1, 3))), expected) and len(ran) == 2, "a copy is intercepted too"
    assert jnp.array_equal(nnx.merge(graph, state)(jnp.ones((1, 3))), expected) and len(ran) == 2
