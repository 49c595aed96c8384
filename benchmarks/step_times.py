"""Step times that others published, predicted from the traced step: nothing compiles, and no chip is needed.

    python benchmarks/step_times.py                      # the table
    python benchmarks/step_times.py --only llama3.1-70b  # some cases
    python benchmarks/step_times.py --parts              # with the parts of each time
    python benchmarks/step_times.py --markdown           # the table of docs/records/step_times.md
    python benchmarks/step_times.py --calibrate          # the number that the first two cases give

The first two cases calibrate the middle of `TRAFFIC` in `jaxshard/plan/time/products.py`, the one number that no public
measurement of a single operation gives; nothing else is fitted. The others are predictions: their configuration is the
published one, with the same products computed again in the backward pass, except where `differs` says otherwise.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxshard as js
from jaxshard.cost.hardware import Chip
from jaxshard.plan.time.network import CollectiveCost
from jaxshard.plan.time.products import TRAFFIC, ProductCost
from jaxshard.plan.time.step_time import StepTime, step_time, update_bytes

RECIPES = "AI-Hypercomputer/tpu-recipes, training/"
MAXTEXT = "AI-Hypercomputer/maxtext, "
FUJI = "apple/axlearn, axlearn/experiments/text/gpt/fuji.py"
TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"

# What MaxText's and AXLearn's policies keep, by the names of our models; the others are computed again.
QKV = {"qkv": "save"}
QKV_PROJ = {"qkv": "save", "attention_proj": "save"}
QKV_OUT = {"qkv": "save", "attention_out": "save"}
ATTENTION = {"qkv": "save", "attention_out": "save", "attention_proj": "save"}
DOTS_OUT = ATTENTION | {"mlp_hidden": "save"}
# Why a part is off.
HIDDEN = "its collectives run beside products"
ACCUMULATES = "four micro-batches of a row each: weights are gathered, and read from memory, four times"
V5E = "the rate of v5e's large products is v6e's share of the peak, for want of a measurement"
BETWEEN_HOSTS = "the network between AWS's hosts (EFA), taken for InfiniBand of the same bandwidth"
POWER = "products: a limit of 500 W in place of 700 W"
TITAN_DIFFERS = "H100 with 96 GB and a power limit of 500 W; every second product of a block is computed again"


@dataclass(frozen=True)
class Case:
    """One published step time, with its configuration.

    Attributes:
      name: of the model and the devices.
      source: where it is published.
      seconds: of a step, as published.
      model: the size's name.
      topology: of one slice, as `js.plan.planned_mesh` takes it.
      rows: of a batch, on each device.
      seq: positions of a row.
      changes: of the model's arguments.
      axes: the mesh; by default one axis over all devices of a slice, and one over slices.
      slices: how many of them there are.
      remat: what the forward pass keeps.
      microbatches: in which a step computes its rows.
      bandwidth: of the memory, bytes per second, where the published chips have another than the table's.
      fused: True if attention's backward is one kernel of five products, not two of seven.
      differs: what the published run does otherwise than ours, in words.
      off: why a part is off where the error is above 15 %, in words.
      suspect: the part that `off` speaks of, for which `what_if` says what it would have to be: "products",
        "communication" or "microbatches".
    """

    name: str
    source: str
    seconds: float
    model: str
    topology: str
    rows: int
    seq: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)
    slices: int = 1
    remat: Any = "nothing"
    microbatches: int = 1
    bandwidth: float | None = None
    fused: bool = False
    differs: str = ""
    off: str = ""
    suspect: str = ""


FUJI_7B = {"vocab": 32_768, "tied": True}
FUJI_70B = {"vocab": 32_768}


def maxtext(tflops: float, rows: int, **sizes: int) -> tuple[dict[str, Any], float]:
    """Return a model of MaxText's `global_parameter_scale` and the seconds of a step that its TFLOP/s stand for.

    Its count of FLOPs, of `calculate_tflops_training_per_device` at that time: six for each parameter in a product and
    token, and 12 for each head's width, position of the row, block and token, without the half for the causal mask.
    """
    changes = {"vocab": 32_000, "kv_heads": sizes["heads"], "head_dim": 128, "seq": 2048, **sizes}
    width, depth, hidden, inner = sizes["width"], sizes["depth"], sizes["hidden"], 128 * sizes["heads"]
    params = depth * (4 * width * inner + 3 * width * hidden) + 32_000 * width
    tokens = rows * 2048
    return changes, tokens * (6 * params + 12 * depth * inner * 2048) / tflops / 1e12


S16 = maxtext(120, 6, width=4096, depth=32, heads=64, hidden=28_672)
S32 = maxtext(132, 4, width=8192, depth=32, heads=64, hidden=28_672)
S64 = maxtext(118, 2, width=8192, depth=64, heads=64, hidden=28_672)
S16_4 = maxtext(117, 6, width=4096, depth=32, heads=64, hidden=28_672)

CALIBRATION = (
    Case("llama3.1-8b v6e-8", RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-8", 3.443, "llama3-8b", "v6e:2x4", 3, 8192,
         remat=QKV_PROJ, fused=True),
    Case("fuji-7b-v2 v5e-256x4", FUJI, 2.21, "llama2-7b", "v5e:16x16", 1, 4096, FUJI_7B, slices=4, remat="dots"),
)  # fmt: skip

PREDICTED = (
    Case("llama3.1-8b v6e-16", RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-16", 3.393, "llama3-8b", "v6e:4x4", 3, 8192,
         remat=QKV_PROJ, fused=True),
    Case("llama3.1-8b v6e-32", RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-32", 3.495, "llama3-8b", "v6e:4x8", 3, 8192,
         remat=QKV_PROJ, fused=True),
    Case("llama3.1-8b v6e-64", RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-64", 5.652, "llama3-8b", "v6e:8x8", 5, 8192,
         remat=QKV_PROJ, fused=True),
    Case("llama3.1-8b v6e-128", RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-128", 4.602, "llama3-8b", "v6e:8x16", 4,
         8192, remat=QKV_PROJ, fused=True),
    Case("llama3.1-8b v6e-256", RECIPES + "trillium/Llama3.1-8B-MaxText/v6e-256", 4.546, "llama3-8b", "v6e:16x16", 4,
         8192, remat=QKV_PROJ, fused=True),
    Case("mistral-7b v6e-8", RECIPES + "trillium/Mistral-7B-MaxText", 6.320, "mistral-7b", "v6e:2x4", 6, 8192,
         remat=QKV_PROJ, fused=True),
    Case("llama3.1-70b v6e-32", RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-32", 17.790, "llama3-70b", "v6e:4x8", 2,
         8192, remat=QKV, fused=True),
    Case("llama3.1-70b v6e-64", RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-64", 18.688, "llama3-70b", "v6e:8x8", 2,
         8192, remat=QKV, fused=True),
    Case("llama3.1-70b v6e-128", RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-128", 34.786, "llama3-70b", "v6e:8x16", 4,
         8192, remat=QKV, fused=True),
    Case("llama3.1-70b v6e-256", RECIPES + "trillium/Llama3.1-70B-MaxText/v6e-256", 42.656, "llama3-70b", "v6e:16x16",
         5, 8192, remat=QKV, fused=True),
    Case("llama2-70b v6e-256", RECIPES + "trillium/Llama2-70B-MaxText", 9.052, "llama2-70b", "v6e:16x16", 2, 4096,
         remat=QKV),
    Case("llama3.1-405b v6e-256x2", RECIPES + "trillium/Llama3.1-405B-MaxText", 54.803, "llama3-405b", "v6e:16x16", 1,
         8192, slices=2, axes={"slices": 2, "data": 256}),
    Case("mixtral-8x7b v6e-256", RECIPES + "trillium/Mixtral-8x7B-MaxText", 13.484, "mixtral-8x7b", "v6e:16x16", 12,
         4096, {"capacity": 1.25, "seq": 4096}, remat=QKV_PROJ),
    Case("gpt3-175b v6e-256", RECIPES + "trillium/GPT3-175B-MaxText/bf16", 17.182, "gpt3-175b", "v6e:16x16", 3, 2048),
    Case("fuji-70b-v2 v6e-256x4", FUJI, 4.9, "llama2-70b", "v6e:16x16", 1, 4096, FUJI_70B, slices=4, remat=QKV,
         off=HIDDEN),
    Case("fuji-70b-v2 v6e-256", FUJI, 19.5, "llama2-70b", "v6e:16x16", 4, 4096, FUJI_70B, remat=ATTENTION,
         microbatches=4, off=ACCUMULATES, suspect="microbatches"),
    Case("fuji-70b-v2 v5e-256x4", FUJI, 14.3736, "llama2-70b", "v5e:16x16", 1, 4096, FUJI_70B, slices=4, remat="dots"),
    Case("maxtext-16b v5e-256", MAXTEXT + "src/maxtext/configs/tpu/v5e/README.md: 120 TFLOP/s", S16[1], "llama2-7b",
         "v5e:16x16", 6, 2048, S16[0], off=V5E, suspect="products"),
    Case("maxtext-32b v5e-256", MAXTEXT + "src/maxtext/configs/tpu/v5e/README.md: 132 TFLOP/s", S32[1], "llama2-7b",
         "v5e:16x16", 4, 2048, S32[0], off=V5E, suspect="products"),
    Case("maxtext-64b v5e-256", MAXTEXT + "src/maxtext/configs/tpu/v5e/README.md: 118 TFLOP/s", S64[1], "llama2-7b",
         "v5e:16x16", 2, 2048, S64[0], off=V5E, suspect="products"),
    Case("maxtext-16b v5e-256x4", MAXTEXT + "src/maxtext/configs/tpu/v5e/README.md: 117 TFLOP/s", S16_4[1],
         "llama2-7b", "v5e:16x16", 6, 2048, S16_4[0], slices=4, off=V5E, suspect="products"),
    Case("llama2-70b v5p-1024", MAXTEXT + "docs/reference/models/tiering.md: 692 tokens/s", 4 * 4096 / 692,
         "llama2-70b", "v5p:8x8x8", 4, 4096, remat=QKV_PROJ),
    Case("llama3.1-405b v5p-1024", RECIPES + "v5p/Llama3.1-405B-MaxText", 131.474, "llama3-405b", "v5p:8x8x8", 2, 8192,
         remat={"attention_out": "save"}),
    Case("llama3.1-70b tpu7x-64", RECIPES + "ironwood: 8k-bf16-tpu7x-4x4x4", 12.20, "llama3-70b", "tpu7x:4x4x4", 2,
         8192, remat=QKV_OUT, fused=True, off=HIDDEN),
    Case("llama3.1-405b tpu7x-256", RECIPES + "ironwood: 8k-bf16-tpu7x-4x8x8", 98.34, "llama3-405b", "tpu7x:4x8x8", 3,
         8192, fused=True),
    Case("fuji-7b-v2 h100-256", FUJI, 1.78, "llama2-7b", "h100:8x32", 4, 4096, FUJI_7B, {"replica": 32, "data": 8},
         remat=ATTENTION, off=BETWEEN_HOSTS, suspect="communication"),
    Case("fuji-70b-v2 h100-512", FUJI, 12.9, "llama2-70b", "h100:8x64", 2, 4096, FUJI_70B, {"replica": 4, "data": 128},
         remat=ATTENTION, off=BETWEEN_HOSTS, suspect="communication"),
    Case("llama2-7b h100-8", "NVIDIA/JAX-Toolbox, docs/frameworks/maxtext/README.md", 0.721, "llama2-7b", "h100:8", 2,
         4096, remat=DOTS_OUT),
    Case("llama3.1-70b h200-256", "AI-Hypercomputer/gpu-recipes, training/a3ultra/llama3-1-70b/maxtext-pretraining-gke",
         15.516, "llama3-70b", "h200:8x32", 2, 8192, axes={"replica": 2, "data": 128}, remat=ATTENTION),
    Case("llama3.1-8b h100-8", TITAN + ", table 1", 2 * 8192 / 6667, "llama3-8b", "h100:8", 2, 8192, remat=ATTENTION,
         bandwidth=2.4e12, differs=TITAN_DIFFERS, off=POWER, suspect="products"),
    Case("llama3.1-8b h100-128", TITAN + ", table 3", 2 * 8192 / 6514, "llama3-8b", "h100:8x16", 2, 8192,
         remat=ATTENTION, bandwidth=2.4e12, differs=TITAN_DIFFERS, off=POWER, suspect="products"),
)  # fmt: skip

LLAMA2_70B = {
    "vocab": 32_000, "width": 8192, "depth": 80, "heads": 64, "kv_heads": 8, "hidden": 28_672, "rope_base": 10_000,
}  # fmt: skip
MISTRAL_7B = {
    "vocab": 32_000, "width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336, "rope_base": 10_000,
}  # fmt: skip


def make_model(case: Case) -> Any:
    """Build the model of a case; Llama 2 70B, Mistral and GPT-3 are variants of sizes that there are."""
    if case.model == "llama2-70b":
        return js.models.make("llama3-70b", **{"seq": case.seq, **LLAMA2_70B, **case.changes})
    if case.model == "mistral-7b":
        return js.models.make("llama3-8b", **{"seq": case.seq, **MISTRAL_7B, **case.changes})
    if case.model == "gpt3-175b":
        sizes = {"vocab": 50_304, "width": 12_288, "depth": 96, "heads": 96, "dropout": 0.0}
        return js.models.make("gpt2-xl", **{"seq": case.seq, **sizes, **case.changes})
    return js.models.make(case.model, **{"seq": case.seq, **case.changes})


@dataclass(frozen=True)
class Result:
    """A predicted step: its time, products and collectives."""

    case: Case
    time: StepTime
    products: tuple[ProductCost, ...]
    collectives: tuple[CollectiveCost, ...]

    @property
    def error(self) -> float:
        """Of the range's middle, as a share of what is published."""
        return self.time.middle / self.case.seconds - 1


def chip_of(case: Case) -> Chip:
    """Look up the chip of a case."""
    device = js.plan.planned_mesh(case.topology, data=-1).devices.flat[0]
    chip = js.plan.chip(device.device_kind, num_cores=device.num_cores)
    assert chip is not None
    return chip._replace(hbm_bandwidth=case.bandwidth) if case.bandwidth else chip


def predict(case: Case) -> Result:
    """Trace the step of a case on devices that are only planned, and predict its time."""
    axes = dict(case.axes) or ({"replica": case.slices, "data": -1} if case.slices > 1 else {"data": -1})
    mesh = js.plan.planned_mesh(case.topology, num_slices=case.slices, **axes)
    chip = chip_of(case)
    model, tx = make_model(case), optax.adamw(1e-4)
    if "replica" in axes:
        strategy = js.hsdp()
    else:
        # The minor axis is gathered first: between slices a device's own part, not all of the array.
        strategy = js.fsdp(tuple(reversed(axes)))
    layout = js.layout(strategy, mesh, model.init, tx)
    batch = {"tokens": jax.ShapeDtypeStruct((case.rows * mesh.size, case.seq + 1), jnp.int32)}
    engine = js.explicit(precision="bf16", remat=case.remat, microbatches=case.microbatches)
    found = js.plan.predict(layout, model.loss, batch, engine, tx=tx, chip=chip, estimate=True)
    products = tuple(fused(one) if case.fused else one for one in found.products)
    collectives = found.collectives
    time = step_time(products, collectives, chip, update=update_bytes(layout))
    return Result(case, time, products, collectives)


def fused(one: ProductCost) -> ProductCost:
    """Return a product of attention's backward pass as a part of one kernel of five products."""
    if not one.where.startswith(("splash_mha_dkv", "splash_mha_dq")):
        return one
    low, high = one.seconds
    less = one.compute * 2 / 7
    return replace(one, flops=one.flops * 5 / 7, compute=one.compute - less, seconds=(low - less, high - less))


MOST = 0.15
"""The error above which the part that is off is named."""

PARTS = ("exposed_communication", "memory_bound")
"""The parts of a time that have a range."""


def explain(result: Result) -> str:
    """Name the part of a time that is off by more than `MOST`: the one that at an end of its range explains the most.

    "" where nothing is off. Where no part's end brings the error below `MOST`, all of them at that end are named, with
    what is left.
    """
    if abs(result.error) <= MOST:
        return ""
    end = 0 if result.error > 0 else 1
    found = []
    for name in PARTS:
        part = getattr(result.time, name)
        left = (result.time.middle - sum(part) / 2 + part[end]) / result.case.seconds - 1
        found.append(
            (abs(left), f"{name.replace('_', ' ')}: {part[end]:.2f} s for {sum(part) / 2:.2f} leave {left:+.0%}")
        )
    if min(found)[0] <= MOST:
        return min(found)[1]
    both = result.time.low if end == 0 else result.time.high
    left = both / result.case.seconds - 1
    busy = result.time.compute[0]
    rest = "" if abs(left) <= MOST else f", of it products at their full rate {busy:.2f} s"
    return f"communication and memory: all parts at their {'best' if end == 0 else 'worst'} leave {left:+.0%}{rest}"


def what_if(result: Result) -> str:
    """Say by a number what the suspected part of a time would have to be for the published one; "" where none is.

    Products: the share of the peak that they would reach, with all other parts at the end of their range that explains
    more. Communication: its seconds and what that is of the mean bandwidth, with the other parts in the middle.
    Micro-batches: what the prediction of a single one leaves.
    """
    case, time = result.case, result.time
    if abs(result.error) <= MOST or not case.suspect:
        return ""
    if case.suspect == "microbatches":
        once = predict(replace(case, microbatches=1))
        return f"with one {once.time.low:.2f} to {once.time.high:.2f} s, which leaves {once.error:+.0%}"
    if case.suspect == "communication":
        now = sum(time.exposed_communication) / 2
        wanted = now + case.seconds - time.middle
        return f"{wanted:.2f} s of it for {now:.2f} would explain all, {now / wanted:.0%} of the bandwidth"
    others = (time.low if result.error > 0 else time.high) - time.compute[0]
    rest, reached = case.seconds - others, chip_of(case).reached
    share = reached * time.compute[0] / rest
    end = "best" if result.error > 0 else "worst"
    return f"with all else at its {end}, products at {share:.0%} of the peak for {reached:.0%} would explain the rest"


def calibrate(results: Sequence[Result]) -> float:
    """Return how often operands and results go through the memory, by least squares of the relative errors."""
    low, high = TRAFFIC
    # The middle of the time is linear in the middle of the traffic, q: rest + once * q.
    pairs = []
    for one in results:
        once = sum(product.seconds[1] - product.seconds[0] for product in one.products) / (high - low)
        rest = one.time.middle - once * (low + high) / 2
        pairs.append((once / one.case.seconds, 1 - rest / one.case.seconds))
    return sum(a * b for a, b in pairs) / sum(a * a for a, _ in pairs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--parts", action="store_true", help="print the parts of each time")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--calibrate", action="store_true", help="print the calibrated number and the one in use")
    asked = parser.parse_args()
    if asked.calibrate:
        print(f"calibrated {calibrate([predict(case) for case in CALIBRATION]):.2f}, in use {sum(TRAFFIC) / 2:.2f}")
        return
    errors = []
    row = "| {} | {} | {} | {} | {} | {} |" if asked.markdown else "{:<26} {:>9} {:>17} {:>8} {:>7}  {}"
    print(row.format("model and chips", "published", "predicted", "middle", "error", "source; the part that is off"))
    if asked.markdown:
        print("|---|---:|---:|---:|---:|---|")
    for case in (*CALIBRATION, *PREDICTED):
        if not case.name.startswith(asked.only):
            continue
        found = predict(case)
        if case in PREDICTED:
            errors.append(abs(found.error))
        words = "; ".join(
            filter(None, (case.source, "calibrates" * (case in CALIBRATION), explain(found), case.off, what_if(found)))
        )
        low, high, middle = found.time.low, found.time.high, found.time.middle
        print(row.format(case.name, f"{case.seconds:.3f}", f"{low:.2f} to {high:.2f}", f"{middle:.2f}",
                         f"{found.error:+.1%}", words), flush=True)  # fmt: skip
        if asked.parts:
            for name in ("compute", "memory_bound", "exposed_communication"):
                print(f"    {name:<22} {getattr(found.time, name)[0]:8.3f} {getattr(found.time, name)[1]:8.3f}")
            for one in found.collectives:
                print(
                    f"    {one.kind:<16}{','.join(one.axes):<8}{one.link:<6}{one.seconds[0]:8.3f} {one.seconds[1]:8.3f}"
                )
    if errors:
        print(f"\nmedian error of {len(errors)} predictions: {statistics.median(errors):.1%}; worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
