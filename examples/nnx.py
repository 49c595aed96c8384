"""A Flax NNX transformer on Python's own source text: data and tensor parallel, and resumed if it is started again."""

import argparse

import jax
import optax
from flax import nnx

import jaxshard as js


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.widen = nnx.Linear(width, 4 * width, rngs=rngs)
        self.narrow = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.narrow(nnx.gelu(self.widen(x)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(256, 128, rngs=rngs)
        self.positions = nnx.Embed(64, 128, rngs=rngs)
        self.blocks = nnx.List([Block(128, rngs) for _ in range(2)])
        self.head = nnx.Linear(128, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jax.numpy.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model: Transformer, batch) -> js.Mean:
    nats = js.cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])
    return js.Mean(nats.sum(), nats.size)


def main(steps: int, folder: str) -> None:
    model, tx = js.nnx(Transformer, loss), optax.adamw(1e-3)
    strategy = js.compose(js.fsdp("data"), js.tensor())
    layout = js.layout(strategy, js.make_mesh(data=-1, tensor=min(2, jax.device_count())), model.init, tx)
    step = js.make_step(model.loss, tx, layout)
    run = js.init(model.init, tx, layout, key=0) if js.latest_step(folder) is None else js.restore(folder, layout)
    source = js.data.windows(js.data.stdlib().train, batch=32, seq=64, seed=0)
    batches = js.batches(source, layout, start=run.step)
    with js.Checkpointer(folder, layout, every=10) as save:  # in the background
        js.fit(run, step, batches, steps=steps, on_run=[save], callbacks=[lambda r: print(r.step, r.metrics["loss"])])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there is no accelerator the CPU appears as eight devices
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--folder", default="nnx_run")
    main(**vars(parser.parse_args()))
