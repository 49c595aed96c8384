"""`LowRank`: the weight that it stands for, its base in int8, and its equation in programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard as js
from jaxshard.core.low_rank import WEIGHT, adapt_matrix, bind_weight, cast_base

KEY = jax.random.key(0)


def adapted(shape=(3, 12, 4, 5), dtype=jnp.float32, base=None, stack=1, inputs=1):
    w = jax.random.normal(KEY, shape, dtype)
    x = adapt_matrix(w, KEY, stack=stack, inputs=inputs, rank=2, gain=0.5, base=base)
    return w, jax.tree_util.tree_map_with_path(lambda path, x: x + 1 if path[0].name == "b" else x, x)


def test_the_weight_is_the_base_and_the_gain_times_the_product_of_the_factors():
    w, x = adapted(inputs=2)
    flat = np.asarray(x.a).reshape(3, -1, 2) @ np.asarray(x.b).reshape(3, 2, -1)
    np.testing.assert_allclose(x.weight(), w + 0.5 * flat.reshape(w.shape), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(js.merge_lora({"w": x, "b": w})["w"], x.weight())
    assert x.stack == 1 and x.inputs == 2


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_element_of_an_int8_base_is_wrong_by_half_its_channels_scale_at_most(dtype):
    w = jax.random.normal(KEY, (64, 8)).at[:, 3].set(0).astype(dtype)
    base, scale = cast_base(w, 0, 1, "int8")
    wide, scale = w.astype(jnp.float32), scale.astype(jnp.float32)
    assert base.dtype == jnp.int8
    np.testing.assert_allclose(scale, jnp.abs(wide).max(0) / 127, rtol=1e-6 if dtype == jnp.float32 else 4e-3)
    # The largest magnitude itself may be cut off where a scale in bf16 was rounded down: by 127 times that rounding.
    allowed = 0.5 * scale * (1 + 1e-5) if dtype == jnp.float32 else scale
    assert (jnp.abs(base * scale - wide) <= allowed).all()
    assert not base[:, 3].any()


@pytest.mark.parametrize(
    "dtype, base, weight",
    [("float32", "bf16", "float32"), ("bfloat16", "int8", "bfloat16"), ("bfloat16", None, "bfloat16")],
)
def test_a_weight_is_computed_in_the_models_dtype_and_factors_are_in_f32(dtype, base, weight):
    w, x = adapted(dtype=jnp.dtype(dtype), base=base)
    assert x.a.dtype == x.b.dtype == jnp.float32
    assert x.weight().dtype == x.dtype == jnp.dtype(weight)
    assert x.base.dtype == {None: w.dtype, "bf16": jnp.bfloat16, "int8": jnp.int8}[base]


def test_its_equation_is_compiled_differentiated_and_mapped_as_the_weight_is():
    _, x = adapted(base="int8")

    def total(a, weight):
        return jnp.sin(weight(jax.tree.unflatten(jax.tree.structure(x), [x.base, a, x.b, x.scale]))).sum()

    plain = jax.grad(total)(x.a, lambda x: x.weight())
    np.testing.assert_allclose(jax.jit(jax.grad(total), static_argnums=1)(x.a, bind_weight), plain, rtol=1e-6)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), x)
    np.testing.assert_allclose(jax.vmap(bind_weight)(two)[1], x.weight(), rtol=1e-6)
    assert [eqn.primitive for eqn in jax.make_jaxpr(bind_weight)(x).eqns] == [WEIGHT]
