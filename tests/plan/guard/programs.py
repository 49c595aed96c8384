"""Small training steps in plain JAX, from which the faults and refactorings of a guard's tests are made.

Each function takes the devices and returns (jitted, arguments). The programs import nothing of this library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, DEPTH, ROWS, VOCAB = 64, 4, 16, 512
Made = tuple[Any, ...]
Spec = Callable[[Any], P]


def mesh_of(devices: Sequence[Any], **axes: int) -> Mesh:
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def place(mesh: Mesh, tree: Any, spec: Spec) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x))), tree)


def constrain(mesh: Mesh, tree: Any, spec: Spec) -> Any:
    return jax.tree.map(lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec(x))), tree)


def rows_split(x: Any) -> P:
    return P("data") if x.ndim else P()


def replicated(x: Any) -> P:
    return P()


def embedding() -> dict[str, Any]:
    return {"embed": jax.ShapeDtypeStruct((VOCAB, WIDTH), jnp.float32)}


def layers() -> dict[str, Any]:
    return {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(DEPTH)}


def token_loss(params: Any, x: Any, y: Any) -> Any:
    """Embed tokens, apply the layers, and multiply with the embedding again."""
    h = params["embed"][x]
    for i in range(DEPTH):
        h = h + jnp.tanh(h @ params[f"w{i}"])
    return jnp.square(h @ params["embed"].T - y[..., None]).mean()


def tokens() -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((ROWS, 8), jnp.int32), jax.ShapeDtypeStruct((ROWS, 8), jnp.float32)


def step_of(
    mesh: Mesh,
    params_spec: Spec,
    opt_spec: Spec,
    *,
    loss: Callable[..., Any] = token_loss,
    params: Any = None,
    batch: Any = None,
    batch_spec: Spec = rows_split,
    again: bool = False,
) -> Made:
    """Make a step of AdamW with arrays stored as the specs say; `again` computes the loss a second time, for logs."""
    tx = optax.adamw(1e-3)
    params = embedding() | layers() if params is None else params
    batch = tokens() if batch is None else batch
    opt_state = jax.eval_shape(tx.init, params)

    def train_step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        grads = constrain(mesh, grads, opt_spec)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = constrain(mesh, optax.apply_updates(params, updates), params_spec)
        return new, constrain(mesh, opt_state, opt_spec), loss(new, x, y) if again else value

    arguments = (place(mesh, params, params_spec), place(mesh, opt_state, opt_spec), *place(mesh, batch, batch_spec))
    return jax.jit(train_step, donate_argnums=(0, 1)), arguments


def rows() -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def dense_loss(params: Any, x: Any, y: Any) -> Any:
    for i in range(DEPTH):
        x = jnp.tanh(x @ params[f"w{i}"])
    return jnp.square(x - y).mean()


def manual_step(mesh: Mesh, gradients: Callable[..., Any], params_spec: P, *, params: Any = None) -> Made:
    """Make a step of SGD whose collectives are written by hand: `gradients(params, x, y)` runs on each device."""
    batch_spec = P(mesh.axis_names)

    def on_each_device(params: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 1e-3 * g.astype(p.dtype), params, gradients(params, x, y))

    specs = (params_spec, batch_spec, batch_spec)
    step = jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=params_spec, check_vma=False)
    params = place(mesh, layers() if params is None else params, lambda x: params_spec)
    arguments = (params, *place(mesh, rows(), lambda x: batch_spec))
    return jax.jit(step, donate_argnums=0), arguments
