"""Small training steps in plain JAX, each with a silent fault that was published somewhere, before and after.

A pair is two functions of the devices that return (jitted, arguments). They import nothing of this library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, DEPTH, ROWS = 64, 4, 16
Made = tuple[Any, ...]


def mesh_of(devices: Sequence[Any], **axes: int) -> Mesh:
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def shapes_of(tree: Any, mesh: Mesh, spec: Callable[[Any], P]) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x))), tree)


def rows_split(x: Any) -> P:
    return P("data") if x.ndim else P()


def replicated(x: Any) -> P:
    return P()


def widest_split(x: Any) -> P:
    return P(
        *["data" if size == max(x.shape) and at == int(np.argmax(x.shape)) else None for at, size in enumerate(x.shape)]
    )


def params_of() -> dict[str, Any]:
    shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    return {"embed": jax.ShapeDtypeStruct((512, WIDTH), jnp.float32)} | {f"w{i}": shape for i in range(DEPTH)}


def loss(params: Any, x: Any, y: Any) -> Any:
    h = params["embed"][x]
    for i in range(DEPTH):
        h = h + jnp.tanh(h @ params[f"w{i}"])
    return jnp.square(h @ params["embed"].T - y[..., None]).mean()


def step_for(
    mesh: Mesh, params_spec: Callable[[Any], P], opt_spec: Callable[[Any], P], grads_spec: Callable[[Any], P] | None = None,
    *, loss_fn: Callable[..., Any] = loss, batch_spec: Callable[[Any], P] = rows_split, tx: Any = None, takes: int = 1,
) -> Made:  # fmt: skip
    """A step of AdamW whose arrays are stored as the specs say; with `grads_spec` gradients are constrained to it."""
    tx = tx or optax.adamw(1e-3)
    params = params_of()
    opt_state = jax.eval_shape(tx.init, params)

    def constrain(tree: Any, spec: Callable[[Any], P]) -> Any:
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec(x))), tree)

    def train_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def total(params: Any, x: Any, y: Any) -> Any:
            return loss_fn(params, x, y)

        if takes == 1:
            value, grads = jax.value_and_grad(total)(params, x, y)
        else:

            def one(sums: Any, part: Any) -> Any:
                value, grads = jax.value_and_grad(total)(params, *part)
                if grads_spec is not None:
                    grads = constrain(grads, grads_spec)
                return jax.tree.map(jnp.add, sums, grads), value

            parts = jax.tree.map(lambda a: a.reshape(takes, a.shape[0] // takes, *a.shape[1:]), (x, y))
            grads, values = lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)
            value = values.mean()
        if grads_spec is not None:
            grads = constrain(grads, grads_spec)
        updates, opt_state = tx.update(grads, opt_state, params)
        opt_state = constrain(opt_state, opt_spec)
        return constrain(optax.apply_updates(params, updates), params_spec), opt_state, value

    rows = jax.ShapeDtypeStruct((ROWS, 8), jnp.int32)
    batch = shapes_of((rows, jax.ShapeDtypeStruct((ROWS, 8), jnp.float32)), mesh, batch_spec)
    arguments = (shapes_of(params, mesh, params_spec), shapes_of(opt_state, mesh, opt_spec), *batch)
    return jax.jit(train_step, donate_argnums=(0, 1)), arguments
