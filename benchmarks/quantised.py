"""Products in 8 bits: what compilers make of them, and what they do to the loss of the default training.

    python benchmarks/quantised.py text [--topologies v6e:2x2 tpu7x:2x2x1 h100:4]
    python benchmarks/quantised.py loss [--steps 320] [--seeds 3]

`text` compiles a rounded product for chips that are not there, and prints the types of the operands and results of the
products in the compiled text. GPUs need the plugin that the error names.

`loss` trains gpt-1m, the model of `jaxshard train`, on the source of Python's standard library on one device, in f32
and with `quant`, and prints the mean loss of the last tenth of the steps, and its ratio to f32's for the same seed.
Each row is printed as soon as it is there.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics

import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxshard as js

QUANTS = (None, "int8", "fp8")

_NAMED = re.compile(r"%?([\w.-]+) = (\w+)\[")
_PRODUCT = re.compile(r"= (\w+)\[[^ ]* (?:dot|convolution)\(([^)]*)\)")


def products(text: str) -> list[str]:
    """List the products in the text of a compiled program, such as "s8 x s8 -> s32"."""
    found: list[str] = []
    types: dict[str, str] = {}
    for line in text.splitlines():
        if line.endswith("{"):  # a computation, with names of its own
            types = {}
        types.update(_NAMED.findall(line))
        if product := _PRODUCT.search(line):
            operands = re.findall(r"%([\w.-]+)", product[2])
            found.append(f"{' x '.join(types.get(name, '?') for name in operands)} -> {product[1]}")
    return found


def show_texts(topologies: list[str]) -> None:
    import qwix

    for topology in topologies:
        chips = js.plan.topology_mesh(topology, data=-1)
        on_one = jax.sharding.SingleDeviceSharding(chips.devices.flat[0])
        x, w = (jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16, sharding=on_one) for rows in (512, 1024))
        for quant in QUANTS:
            layer = nn.Dense(1024, use_bias=False)
            if quant is not None:
                layer = qwix.quantize_model(layer, qwix.QtProvider(js.models.quant_rules(quant)))
            apply = jax.jit(lambda x, w, layer=layer: layer.apply({"params": {"kernel": w}}, x))
            text = apply.lower(x, w).compile().as_text()
            print(f"{topology:12} {quant or 'bf16':5} {', '.join(products(text))}", flush=True)


def train(quant: str | None, seed: int, steps: int) -> float:
    """Train gpt-1m on one device, and return the mean loss of the last tenth of the steps."""
    size = js.models.SIZES["gpt-1m"]
    model, tx = js.models.make("gpt-1m", quant=quant), size.recipe.optimizer(steps)
    layout = js.layout(js.fsdp(), js.make_mesh(jax.devices()[:1], data=1), model.init, tx)
    step, run = js.make_step(model.loss, tx, layout), js.init(model.init, tx, layout, seed)
    corpus = js.data.stdlib()
    source = js.data.windows(corpus.train, batch=size.recipe.batch, seq=size.shape["seq"], seed=seed)
    losses = []
    for batch in itertools.islice(js.batches(source, layout), steps):
        run, metrics = step(run, batch)
        losses.append(float(metrics["loss"]))
    return statistics.fmean(losses[-max(1, steps // 10) :])


def show_losses(steps: int, seeds: int) -> None:
    for seed in range(seeds):
        plain = train(None, seed, steps)
        print(f"seed {seed}  f32   {plain:.4f}", flush=True)
        for quant in ("int8", "fp8"):
            loss = train(quant, seed, steps)
            print(f"seed {seed}  {quant:5} {loss:.4f}  {100 * (loss / plain - 1):+.2f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("text", "loss"))
    parser.add_argument("--topologies", nargs="+", default=["v6e:2x2", "tpu7x:2x2x1", "h100:4"])
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    if args.what == "text":
        show_texts(args.topologies)
    else:
        show_losses(args.steps, args.seeds)


if __name__ == "__main__":
    main()
