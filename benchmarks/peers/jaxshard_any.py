"""Two devices by this package; `how` names the strategy."""

import jax
import optax
from flax_gpt import make_gpt, mean_loss
from shape import LEARNING_RATE, WEIGHT_DECAY

import jaxshard as js


def build(shape, rank, meeting, how="fsdp", engine="explicit"):
    js.simulate_devices(2)
    batch, tx = {"tokens": shape.tokens()}, optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    def loss(model, batch):
        loss = mean_loss(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])
        return js.Mean(loss * len(batch["tokens"]), len(batch["tokens"]))

    model = js.linen(make_gpt(shape), loss, batch)
    mesh, strategy = js.make_mesh(**{"tensor" if how == "tensor" else "data": 2}), getattr(js, how)()
    layout = js.layout(strategy, mesh, model.init, tx)
    run = js.init(model.init, tx, layout, key=0)
    train_step = js.make_step(model.loss, tx, layout, engine=getattr(js, engine)())
    batch = jax.device_put(batch, layout.batch_shardings(batch))

    def step():
        nonlocal run
        run, metrics = train_step(run, batch)
        return float(metrics["loss"])

    return step, sum(x.size for x in jax.tree.leaves(run.params))
