"""A training step in plain JAX with sharded parameters, the text that `refactorings.py` edits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, HIDDEN, DEPTH, ROWS, SEQ, VOCAB = 64, 128, 2, 16, 8, 256


def normalize(x):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(x, w):
    hidden = jax.nn.silu(normalize(x) @ w["up"])
    return x + hidden @ w["down"]


def loss_fn(params, batch):
    x = params["embed"][batch["tokens"]]
    for w in params["blocks"]:
        x = block(x, w)
    logits = normalize(x) @ params["head"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return nats.mean()


def init(key):
    def normal(number, *shape):
        return 0.02 * jax.random.normal(jax.random.fold_in(key, number), shape)

    embed = normal(0, VOCAB, WIDTH)
    head = normal(1, WIDTH, VOCAB)
    blocks = [{"up": normal(2 + i, WIDTH, HIDDEN), "down": normal(9 + i, HIDDEN, WIDTH)} for i in range(DEPTH)]
    return {"embed": embed, "head": head, "blocks": blocks}


tx = optax.adamw(1e-3, weight_decay=0.01)


def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return params, opt_state, loss


def make(devices):
    mesh = Mesh(np.array(devices), ("data",))

    def place(tree, spec):
        def placed(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec if x.ndim else P()))

        return jax.tree.map(placed, tree)

    params = jax.eval_shape(init, jax.random.key(0))
    opt_state = place(jax.eval_shape(tx.init, params), P("data"))
    params = place(params, P("data"))
    tokens = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
    batch = place({"tokens": tokens, "labels": tokens}, P("data"))
    step = jax.jit(train_step, donate_argnums=(0, 1))
    return step, (params, opt_state, batch)
