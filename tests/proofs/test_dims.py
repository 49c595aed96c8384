"""Where a dimension goes: entry i along it changes entry i of the results alone, or the table says that it is lost."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxshard.core.jaxpr import all_equations
from jaxshard.proofs.dims import follow_dim

LOST = None
RNG = np.random.default_rng(0)
A, B = (jnp.asarray(RNG.normal(size=size), jnp.float32) for size in ((2, 3, 4), (2, 4, 5)))

WAYS = {
    "add": (lambda x: x + 1, [0, 1, 2]),
    "cumsum": (lambda x: lax.cumsum(x, 1), [0, LOST, 2]),
    "sort": (lambda x: lax.sort(x, dimension=2), [0, 1, LOST]),
    "concatenate": (lambda x: lax.concatenate([x, x], 0), [LOST, 1, 2]),
    "qr": (lambda x: lax.linalg.qr(x)[0], [0, LOST, LOST]),
    "reduce_sum": (lambda x: x.sum(1), [0, LOST, 1]),
    "reduce_window_sum": (lambda x: nn.avg_pool(x, (2,)), [LOST, LOST, LOST]),
    "argmax": (lambda x: jnp.argmax(x, 0), [LOST, 0, 1]),
    "dot_general": (lambda x: lax.dot_general(x, B, (((2,), (1,)), ((0,), (0,)))), [0, 1, LOST]),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, 5, 3, 4), (0, 2, 3)), [0, 2, 3]),
    "reshape": (lambda x: lax.reshape(x, (2, 12)), [0, LOST, LOST]),
    "transpose": (lambda x: x.transpose(2, 0, 1), [1, 2, 0]),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), [LOST, 0, 1]),
    "slice": (lambda x: lax.slice(x, (0, 1, 0), (2, 3, 4)), [0, LOST, 2]),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 0, 1), (2, 3, 2)), [0, 1, LOST]),
    "dynamic_update_slice": (lambda x: lax.dynamic_update_slice(x, x[:, :1], (0, 1, 0)), [0, LOST, 2]),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 0))), [0, 1, LOST]),
    "rev": (lambda x: lax.rev(x, (2,)), [0, 1, LOST]),
    "gather": (lambda x: jnp.take(x, jnp.array([1, 0]), axis=1, mode="clip"), [0, LOST, 2]),
    "fft": (lambda x: jnp.fft.fft(x), [LOST, LOST, LOST]),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_dimension_is_followed(name):
    fn, expected = WAYS[name]
    x = A[:1] if name == "squeeze" else A
    equation = [eqn for eqn in all_equations(jax.make_jaxpr(fn)(x)) if eqn.primitive.name in (name, "geqrf")][-1]
    assert [follow_dim(equation, 0, dim) for dim in range(3)] == expected
    for dim, to in enumerate(expected):
        if to is not None and name not in ("qr", "argmax"):
            changed = np.asarray(fn(x) != fn(x.at[(slice(None),) * dim + (-1,)].multiply(3.0)))
            others = tuple(other for other in range(changed.ndim) if other != to)
            assert changed.any(others).tolist() == [False] * (x.shape[dim] - 1) + [True]


def test_the_right_operand_of_a_product_and_the_indices_of_a_gather():
    program = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))))(A, B)
    assert [follow_dim(program.eqns[0], 1, dim) for dim in range(3)] == [0, None, 2]
    mapped = jax.make_jaxpr(jax.vmap(lambda x, i: x[i]))(A, jnp.array([[1, 0], [2, 2]]))
    (gather,) = [eqn for eqn in all_equations(mapped) if eqn.primitive.name == "gather"]
    assert [follow_dim(gather, 0, dim) for dim in range(3)] == [0, None, 2]
    assert [follow_dim(gather, 1, dim) for dim in range(3)] == [0, 1, None]
