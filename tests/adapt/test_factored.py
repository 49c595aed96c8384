"""Products with low-rank weights in two steps: equal to the merged weight, and no array as large as it is made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.adapt.factored import factor_products
from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.core.low_rank import WEIGHT, adapt_matrix

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (3, 6, 8))


def matrix(shape, inputs=1, base=None, stack=0):
    x = adapt_matrix(jax.random.normal(KEY, shape), KEY, stack=stack, inputs=inputs, rank=2, gain=0.5, base=base)
    return jax.tree_util.tree_map_with_path(lambda path, x: x + 1 if path[0].name == "b" else x, x)


PRODUCTS = {
    "matmul": (lambda w, x: x @ w, (8, 5), 1),
    "transposed": (lambda w, x: x @ w.T, (5, 8), 1),
    "left": (lambda w, x: jnp.einsum("hio,bti->hobt", w.transpose(1, 0, 2), x), (8, 4, 5), 1),
    "heads": (lambda w, x: jnp.einsum("bti,iho->bhto", x, w), (8, 4, 5), 1),
    "joined": (lambda w, x: jnp.einsum("bho,hoi->bi", x[:, :4, :5], w), (4, 5, 8), 2),
    "jit": (jax.jit(lambda w, x: jnp.sin(x) @ w), (8, 5), 1),
    "checkpoint": (jax.checkpoint(lambda w, x: jnp.sin(x @ w)), (8, 5), 1),
}
OTHERS = {
    "lookup": (lambda w, x: w[jnp.arange(3)] * x.sum(), (8, 5), 1),
    "part": (lambda w, x: jnp.einsum("bti,iho->bto", x[..., :5], w.transpose(2, 1, 0)), (6, 4, 5), 1),
    "convolution": (lambda w, x: jax.lax.conv(x[:, :, :, None], w, (1, 1), "SAME"), (4, 6, 1, 1), 2),
    "rounded": (lambda w, x: x @ w.astype(jnp.bfloat16).astype(jnp.float32), (8, 5), 1),
    "scan": (lambda w, x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=2)[0], (8, 8), 1),
}


QUICK = ("matmul", "heads", "checkpoint", "lookup", "rounded")
CELLS = [pytest.param(name, "int8", marks=[] if name in QUICK else pytest.mark.slow) for name in [*PRODUCTS, *OTHERS]]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "name, base", CELLS + [pytest.param(name, None, marks=pytest.mark.slow) for name in [*PRODUCTS, *OTHERS]]
)
def test_values_and_gradients_are_those_of_the_merged_weight(name, base):
    fn, shape, inputs = (PRODUCTS | OTHERS)[name]
    w = matrix(shape, inputs, base)

    def total(factors, x, run):
        rest = jax.tree_util.tree_map_with_path(lambda path, x: factors.get(path[0].name, x), w)
        return jnp.cos(run(rest, x)).sum()

    @jax.jit
    def both(factors, x):
        runs = factor_products(fn), lambda w, x: fn(w.weight(), x)
        return [jax.value_and_grad(total, (0, 1))(factors, x, run) for run in runs]

    ours, merged = both({"a": w.a, "b": w.b}, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, merged)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", PRODUCTS)
def test_neither_the_weight_nor_its_gradient_is_made(name):
    fn, shape, inputs = PRODUCTS[name]
    w = matrix(shape, inputs, "int8")

    def total(a, b, x):
        return factor_products(fn)(jax.tree.unflatten(jax.tree.structure(w), [w.base, a, b, w.scale]), x).sum()

    def made(jaxpr):
        for eqn in open_jaxpr(jaxpr)[0].eqns:
            yield eqn
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from made(inner)

    program = jax.make_jaxpr(jax.grad(total, (0, 1)))(w.a, w.b, X)
    sizes = [
        eqn for eqn in made(program) if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.size == w.base.size
    ]
    assert not sizes and not any(eqn.primitive is WEIGHT for eqn in made(program))


def test_a_function_of_parameters_without_factors_gets_them_as_they_are():
    w = jnp.ones((2, 2))
    assert factor_products(lambda params, x: params["w"])({"w": w}, X) is w


def test_results_that_are_numbers_or_not_arrays_come_back_as_a_plain_call_has_them():
    run = factor_products(lambda w, x: {"one": 1.0, "none": None, "w": w})
    got = run(matrix((8, 5)), X)
    assert got["one"] == 1 and got["none"] is None and got["w"].shape == (8, 5)
