"""A block taken apart equals `jax.vjp` of the block within 1e-6, keeps what it must and computes nothing twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.adapt.remat import checkpoint_body
from jaxshard.engines.pipeline.split_backward import SplitBlock, split_block
from tests.engines.pipeline.pipes import WIDTH, dropping_block, residual_block
from tests.engines.pipeline.test_blocks import BLOCKS, everything
from tests.toys import tree_error

ROWS = 5
POLICIES = ["nothing", "dots", "everything"]


def numbers(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


WEIGHTS = {"b": numbers(0, WIDTH) / 4, "w": numbers(1, WIDTH, WIDTH) / 4}
X, DY = numbers(2, ROWS, WIDTH), numbers(3, ROWS, WIDTH)
KEY = jax.random.key(5)


def taken_apart(block, weights, x, policy="everything", trained=None) -> SplitBlock:
    """As the engine does it, for arrays of these shapes."""
    body = block if policy == "everything" else checkpoint_body(policy, block)
    trained = [True] * len(jax.tree.leaves(weights)) if trained is None else trained
    return split_block(body, weights, x, KEY, trained)


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def floats(tree):
    return [x for x in jax.tree.leaves(tree) if is_float(x)]


def by_vjp(block, weights, x, dy, trained):
    """(y, gradients of the trained weights, cotangents of the floating leaves of x)."""
    leaves, tree = jax.tree.flatten(weights)
    inputs, x_tree = jax.tree.flatten(x)

    def call(own, given):
        own, given = iter(own), iter(given)
        w = [next(own) if chosen else leaf for chosen, leaf in zip(trained, leaves, strict=True)]
        x = [next(given) if is_float(leaf) else leaf for leaf in inputs]
        y = block(jax.tree.unflatten(tree, w), jax.tree.unflatten(x_tree, x), KEY)
        return floats(y), y

    own = [leaf for leaf, chosen in zip(leaves, trained, strict=True) if chosen]
    _, pullback, y = jax.vjp(call, own, floats(x), has_aux=True)
    return y, *pullback(floats(dy))


def check(block, weights, x, dy, policy, trained=None) -> SplitBlock:
    trained = [True] * len(jax.tree.leaves(weights)) if trained is None else trained
    parts = taken_apart(block, weights, x, policy, trained)

    @jax.jit
    def both(weights, x, dy):
        y, kept = parts.forward(weights, x, KEY)
        some, first_dx, carried = parts.input_backward(weights, KEY, kept, dy)
        late = parts.weight_backward(weights, KEY, carried)
        return (y, *parts.backward(weights, KEY, kept, dy)), some, first_dx, late

    (y, grads, dx), some, first_dx, late = both(weights, x, dy)
    alone = jax.jit(lambda weights, x, dy: by_vjp(block, weights, x, dy, trained))(weights, x, dy)
    assert jax.tree.structure(y) == jax.tree.structure(dx) == jax.tree.structure(x)
    assert tree_error(y, alone[0]) <= 1e-6
    for got in (grads, [b if a is None else a for a, b in zip(some, late, strict=True)]):
        assert tree_error(got, alone[1]) <= 1e-6
    for got in (floats(dx), floats(first_dx)):
        # All zero where a block forgets its input.
        assert tree_error(got, alone[2]) <= 1e-6 if any(x.any() for x in alone[2]) else not any(x.any() for x in got)
    assert all((a is None) != (b is None) for a, b in zip(some, late, strict=True))
    return parts


@pytest.mark.parametrize(("policy", "block"), [("dots", everything), ("everything", dropping_block)])
def test_both_ways_equal_the_derivative_by_jax(policy, block):
    check(block, WEIGHTS, X, DY, policy)


def waving(params, x, key):
    return x + jnp.sin(x @ params["w"] + params["b"])


def test_frozen_weights_have_no_gradient():
    parts = check(waving, WEIGHTS, X, DY, "everything", trained=[True, False])
    _, kept = parts.forward(WEIGHTS, X, KEY)
    # Kept is the cosine; the input only the gradient of w would need.
    assert [leaf.shape for leaf in kept] == [(ROWS, WIDTH)]


def shapes_kept(parts, weights=WEIGHTS, x=X):
    return sorted(leaf.shape for leaf in jax.eval_shape(parts.forward, weights, x, KEY)[1])


def shapes_carried(parts):
    kept = jax.eval_shape(parts.forward, WEIGHTS, X, KEY)[1]
    return sorted(leaf.shape for leaf in jax.eval_shape(parts.input_backward, WEIGHTS, KEY, kept, DY)[2])


def test_nothing_but_the_input_is_kept_where_nothing_is_saved():
    parts = taken_apart(everything, WEIGHTS, X, "nothing")
    _, kept = parts.forward(WEIGHTS, X, KEY)
    assert len(kept) == 1
    np.testing.assert_array_equal(kept[0], X)


def softmax_weights(params, x, key):
    """What the backward pass needs of the weights is two functions of them."""
    return x + jnp.sin(x @ jax.nn.softmax(params["w"]) + jnp.exp(params["b"]))


def test_what_depends_on_weights_alone_is_made_again():
    """Kept are the input and the cosine; carried on to the weights' gradients the input and a cotangent."""
    parts = check(softmax_weights, WEIGHTS, X, DY, "everything")
    assert shapes_kept(parts) == [(ROWS, WIDTH)] * 2
    assert shapes_carried(parts) == [(ROWS, WIDTH)] * 2


def test_the_gradient_that_comes_with_the_inputs_is_early_and_all_others_late():
    """A bias's gradient alone is a sum of what the input's needs; it is late, too, for it needs no more of it."""
    parts = taken_apart(residual_block, WEIGHTS, X)
    _, kept = parts.forward(WEIGHTS, X, KEY)
    some, _, carried = parts.input_backward(WEIGHTS, KEY, kept, DY)
    assert [x is None for x in some] == [True, True] and len(carried) == 2
    scanning = taken_apart(BLOCKS[0], WEIGHTS, X)
    _, kept = scanning.forward(WEIGHTS, X, KEY)
    assert [x is None for x in scanning.input_backward(WEIGHTS, KEY, kept, DY)[0]] == [False, False]


# Activations of several arrays.


def counting(params, x, key):
    """A position that is counted up, a row's key made of it, and dropout by that key in a checkpoint of its own."""

    def dropped(h, keys):
        return jnp.where(jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, h.shape[1:]))(keys), h, 0)

    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(x["position"])
    h = jax.checkpoint(dropped)(jnp.tanh(x["h"] @ params["w"] + params["b"]), keys)
    return {"h": x["h"] + h, "penalty": x["penalty"] + jnp.square(h).sum(-1), "position": x["position"] + 1}


TREE = {"h": X, "penalty": numbers(6, ROWS), "position": jnp.arange(ROWS)}
TREE_DY = {"h": DY, "penalty": numbers(7, ROWS), "position": jnp.arange(ROWS)}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("policy", POLICIES[::-1])
def test_integers_among_activations_and_random_keys_among_residuals(policy):
    parts = check(counting, WEIGHTS, TREE, TREE_DY, policy)
    kept = jax.eval_shape(parts.forward, WEIGHTS, TREE, KEY)[1]
    words = [leaf for leaf in kept if leaf.dtype == jnp.uint32]
    assert not any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in kept)
    assert [leaf.shape for leaf in words] == ([(ROWS, 2)] if policy == "everything" else [])


# Work.


def deep(params, x, key):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def flops(fn, *args):
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


def test_the_halves_do_together_what_the_whole_does():
    """Operations within 2 %, about half of them in each; an input of 64 x 32 and four matrices of 32 x 32."""
    weights, x = [numbers(i, 32, 32) for i in range(4)], numbers(9, 64, 32)
    parts = taken_apart(deep, weights, x)
    _, kept = parts.forward(weights, x, KEY)
    _, _, carried = parts.input_backward(weights, KEY, kept, x)
    whole = flops(lambda kept, dy: parts.backward(weights, KEY, kept, dy), kept, x)
    first = flops(lambda kept, dy: parts.input_backward(weights, KEY, kept, dy), kept, x)
    second = flops(lambda carried: parts.weight_backward(weights, KEY, carried), carried)
    assert whole > 8 * 2 * 64 * 32 * 32
    assert first + second == pytest.approx(whole, rel=0.02)
    assert first == pytest.approx(second, rel=0.1)


# Shapes that nobody chose.


# Errors.
