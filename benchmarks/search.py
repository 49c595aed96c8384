"""What `js.plan.search` finds for public shapes, beside the layouts of MaxText's public recipes, both compiled.

    python benchmarks/search.py llama3-8b            # or llama3-70b, mixtral-8x7b, llama3-405b; --json FILE appends

Needs libtpu, no TPU. Both are the same program of this library; the recipe's layout, remat and batch are those of
github.com/AI-Hypercomputer/maxtext at e591f30: benchmarks/maxtext_v5e_model_configs.py (llama3_1_8b_8192_v5e_256),
benchmarks/maxtext_v5p_model_configs.py (llama2_70b_v5p_128, llama3-1-405b), src/maxtext/configs/tpu/v6e/mixtral_8x7b.sh
(its layout; v5e has a quarter of the tokens). `out_proj` there is "attention_proj" here, the query, key and value are
"qkv", `decoder_layer_input` is "block_in", and save_dot_except_mlpwi keeps "qkv" and "attention_proj".

The compiler's cycles count neither collectives nor Pallas kernels. What kernels compute stands beside them, in TFLOPs
of a device by the traced program: a recipe that does not keep "attention_out" runs attention's forward kernel twice.
`cycles_with_kernels` adds the least cycles in which the matrix units can do that, which favours whoever computes more.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxshard as js
from jaxshard.models.sizes import SIZES


class Shape(NamedTuple):
    """A topology, a batch of rows x positions, and the recipe's remat policy under fsdp over all devices."""

    topology: str
    slices: int
    rows: int
    seq: int
    remat: Any


OFFLOADED = {"block_in": "offload", "qkv": "offload", "attention_proj": "offload"}
SHAPES = {
    "llama3-8b": Shape("v5e:16x16", 1, 512, 8192, OFFLOADED),
    "llama3-70b": Shape("v5p:8x8x8", 1, 512, 8192, {"qkv": "save", "attention_proj": "save"}),
    "mixtral-8x7b": Shape("v5e:16x16", 1, 512, 4096, "nothing"),
    "llama3-405b": Shape("v5p:8x8x16", 4, 4096, 8192, {"block_in": "offload", "attention_out": "offload"}),
}


# Multiply-adds in a cycle: matrix units of 128 x 128, four to a TensorCore; v5p's device is a chip of two cores
# (cloud.google.com/tpu/docs/v5e and /v5p, "System architecture").
FLOPS_PER_CYCLE = {"v5e": 4 * 2 * 128**2, "v5p": 8 * 2 * 128**2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--compile", type=int, default=1, help="so many of the best, and the recipe's layout")
    parser.add_argument("--json", type=Path, help="append one line for each program")
    args = parser.parse_args()
    shape, size = SHAPES[args.model], SIZES[args.model]
    per_cycle = FLOPS_PER_CYCLE[shape.topology.split(":")[0]]
    model = size.model()
    tx = model.optimizer(size.recipe.optimizer())
    tokens = jax.ShapeDtypeStruct((shape.rows, shape.seq), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    ranking = js.plan.search(
        model.init, model.loss, tx, batch, shape.topology, num_slices=shape.slices, precision="bf16", progress=print
    )
    print(ranking, flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"searched in {ranking.seconds:.0f} s, {peak:.1f} GiB of the host's memory\n", flush=True)
    write(args.json, {"model": args.model, "search": ranking.as_dict(), "host_gib": peak})
    if not args.compile:
        return
    recipe_axes = {"replica": shape.slices} if shape.slices > 1 else {}
    mesh = js.plan.planned_mesh(shape.topology, num_slices=shape.slices, **recipe_axes, data=-1)
    strategy = js.hsdp("replica", "data") if recipe_axes else js.fsdp("data")
    recipe = js.explicit(precision="bf16", remat=shape.remat)
    programs = [("recipe", f"{dict(mesh.shape)} {shape.remat}", mesh, strategy, recipe)]
    for plan in ranking.plans[: args.compile]:
        mesh = js.plan.planned_mesh(shape.topology, num_slices=shape.slices, **plan.axes)
        programs.append(("winner", str(plan.candidate), mesh, plan.strategy, plan.engine))
    for kind, words, mesh, strategy, engine in programs:
        started = time.perf_counter()
        layout = js.layout(strategy, mesh, model.init, tx)
        step = js.make_step(model.loss, tx, layout, engine=engine)
        try:
            verdict = js.plan.compile_for(step, batch, shape.topology, num_slices=shape.slices, codegen=True)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print(f"{kind}: {words}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            continue
        kernels = kernel_flops(js.plan.predict(layout, model.loss, batch, engine, tx=tx, estimate=True))
        found = {
            "model": args.model,
            "kind": kind,
            "layout": words,
            "fits": verdict.fits,
            "allocated_gib": verdict.allocated_bytes / 2**30,
            "live_gib": verdict.live_bytes / 2**30,
            "cycles": verdict.cycles,
            "kernel_tflops": kernels / 1e12,
            "cycles_with_kernels": verdict.cycles and verdict.cycles + kernels / per_cycle,
            "compile_seconds": verdict.compile_seconds,
        }
        print(json.dumps(found), f"{time.perf_counter() - started:.0f} s", flush=True)
        write(args.json, found)


def kernel_flops(prediction: Any) -> float:
    """Add up what a device's kernels compute in a step; they have a name in the place of a line of the model."""
    products = prediction.products
    return sum(one.flops for one in products if ".py:" not in one.where and not one.where.endswith("dot_general"))


def write(file: Path | None, found: dict[str, Any]) -> None:
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.exit(main())
