"""One device: the training step that every peer brings to two."""

from functools import partial

import jax
import optax
from flax_gpt import make_gpt, mean_loss
from shape import LEARNING_RATE, WEIGHT_DECAY


def build(shape, rank, meeting):
    model, tx = make_gpt(shape), optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    tokens = jax.device_put(shape.tokens())
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])
    opt_state = jax.jit(tx.init)(params)

    def loss_fn(params, tokens):
        return mean_loss(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def step():
        nonlocal params, opt_state
        params, opt_state, loss = update(params, opt_state, tokens)
        return float(loss)

    return step, sum(x.size for x in jax.tree.leaves(params))
