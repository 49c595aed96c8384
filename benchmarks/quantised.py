"""Products in 8 bits: what compilers make of them, and what they do to the loss of the default training.

    python benchmarks/quantised.py text [--topologies v6e:2x2 tpu7x:2x2x1 h100:4]
    python benchmarks/quantised.py loss [--steps 320] [--seeds 3]

`text` compiles a small Llama's step to the end for chips that are not there, and counts the FLOPs of the matrix
products in the compiled text by the types of their operands. GPUs need the plugin that the error names. A product that
was converted to a larger type before it is multiplied counts as one of that type.

`loss` trains gpt-1m, the model of `jaxshard train`, on the source of Python's standard library on one device, in f32
and with `quant`, and prints the mean loss of the last tenth of the steps, and its ratio to f32's for the same seed.
Each row is printed as soon as it is there.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import optax

import jaxshard as js

SIZES = {"vocab": 1024, "width": 1024, "depth": 2, "heads": 8, "kv_heads": 8, "hidden": 2048, "seq": 512}
QUANTS = (None, "int8", "fp8")

_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_PRODUCT = re.compile(r"= (?P<result>\S+) (?P<kind>dot|convolution|custom-call)\((?P<operands>.*?)\)(?P<rest>.*)")
_NAMED = re.compile(r"%?([\w.-]+) = (\w+\[[\d,]*\])")


def products_by_type(text: str) -> Counter[str]:
    """Count the multiply-adds of matrix products in the text of a compiled program, by the types of both operands.

    A loop's body counts once. Products are dots and convolutions, and on GPUs calls of cuBLAS.
    """
    shapes = dict(_NAMED.findall(text))
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        found = _PRODUCT.search(line)
        if found is None or (found["kind"] == "custom-call" and "cublas" not in found["rest"]):
            continue
        names = re.findall(r"%([\w.-]+)", found["operands"])[:2]
        operands = [_SHAPE.match(shapes.get(name, "")) for name in names]
        result = _SHAPE.search(found["result"])
        if len(operands) < 2 or None in operands or result is None:
            continue
        left, right, made = (prod(int(x) for x in one[2].split(",") if x) for one in (*operands, result))
        # Of a product [m, k] by [k, n]: sqrt(m k * k n * m n) = m k n.
        counts["x".join(sorted({one[1] for one in operands}))] += round((left * right * made) ** 0.5)
    return counts


def show_texts(topologies: list[str]) -> None:
    js.simulate_devices(8)
    for topology in topologies:
        for quant in QUANTS:
            model = js.models.llama(**SIZES, quant=quant)
            count = prod(int(x) for x in topology.partition(":")[2].split("x"))
            tx, mesh = optax.adamw(1e-3), js.make_mesh(jax.devices()[:count], data=-1)
            layout = js.layout(js.fsdp(), mesh, model.init, tx)
            step = js.make_step(model.loss, tx, layout, engine=js.explicit(precision="bf16", remat="nothing"))
            batch = {"tokens": jax.ShapeDtypeStruct((2 * count, SIZES["seq"] + 1), jnp.int32)}
            verdict = js.plan.compile_for(step, batch, topology, codegen=True)
            counts = products_by_type(verdict.compiled.as_text())
            total = sum(counts.values())
            shares = ", ".join(f"{name} {100 * one / total:.0f} %" for name, one in counts.most_common())
            print(f"{topology:12} {quant or 'bf16':5} {shares}", flush=True)


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
