"""FSDP over two devices by plain `jax.jit` and NamedShardings that are written by hand."""

from functools import partial

import jax
import optax
from flax_gpt import make_gpt, mean_loss
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from shape import LEARNING_RATE, WEIGHT_DECAY


def build(shape, rank, meeting):
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def sharding_of(x):
        for number, size in enumerate(x.shape):
            if size % 2 == 0 and x.size >= 16_384:
                return NamedSharding(mesh, P(*[None] * number, "data"))
        return whole

    model, tx = make_gpt(shape), optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    tokens, key = jax.device_put(shape.tokens(), rows), jax.random.key(0)

    def init(key):
        params = model.init(key, tokens[:, :-1])
        return params, tx.init(params)

    stored = jax.tree.map(sharding_of, jax.eval_shape(init, key))
    params, opt_state = jax.jit(init, out_shardings=stored)(key)

    def loss_fn(params, tokens):
        params = jax.lax.with_sharding_constraint(params, whole)  # or activations would move in place of weights
        return mean_loss(model.apply(params, tokens[:, :-1]), tokens[:, 1:])

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*stored, whole))
    def update(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def step():
        nonlocal params, opt_state
        params, opt_state, loss = update(params, opt_state, tokens)
        return float(loss)

    return step, sum(x.size for x in jax.tree.leaves(params))
