"""What pipelining costs: `js.pipelined` beside the common circular GPipe (`circular_gpipe.py`), in one run.

    python benchmarks/pipeline.py [--stages 4] [--chunks 2] [--rounds 6] [--json FILE]
    python benchmarks/pipeline.py --topology v5e:2x2 [--maxtext]

Both train the same GPT with the same optimizer on the same global batch, cut into the same micro-batches, over the same
devices; blocks lie on the same devices (v chunks here are v repeats there). Both keep a block's input alone and compute
the rest again in the backward pass. Printed are

- the gradients of both beside those of one device, of a small model (it fails above 1e-5),
- temporaries per device, gradients included, for several numbers of micro-batches,
- the lowered program's size, and CPU-seconds to trace and to compile it, at two numbers of micro-batches,
- CPU-seconds per step, as `interleaved.py` takes them, beside the ratio that the FLOPs of the blocks predict: of a
  block four forwards' worth (forward, again, and twice as much backward), as often as the slots of the schedule, idle
  ones too. Simulated devices compute on garbage where a device has nothing to do, as real ones would.

With `--topology` both are compiled for TPUs that are not here instead: a Llama, products in bf16, weights in f32. With
`--maxtext` MaxText's own training step for a Llama of the same sizes is compiled beside them (`maxtext_pipeline.py`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from interleaved import Step, Variant, check_losses, free_cores, measure, report, work

BASELINE, OURS = "circular gpipe", "jaxshard"
MEMORY_AT, PROGRAM_AT = (8, 16, 32), (8, 64)
LEARNING_RATE = 1e-3


class Shape(NamedTuple):
    """The model, its micro-batches of `rows` rows, and the pipeline."""

    width: int
    blocks: int
    heads: int
    seq: int
    rows: int
    stages: int
    data: int
    chunks: int
    schedule: str
    vocab: int = 256
    kv_heads: int = 0
    hidden: int = 0
    dtype: str | None = None


class Program(NamedTuple):
    """A step that is not compiled yet: its lowered form, and what runs it."""

    lower: Callable[[], Any]
    start: Callable[[], Step]


# Both sides. Imports stand inside functions: a worker is pinned to its cores before any library counts them.


def model_and_optimizer(shape: Shape) -> tuple[Any, Any]:
    """A GPT, or a Llama where it has heads of keys and values."""
    import optax

    from jaxshard.models.gpt import gpt
    from jaxshard.models.llama import llama

    sizes = {"vocab": shape.vocab, "width": shape.width, "depth": shape.blocks, "heads": shape.heads, "seq": shape.seq}
    if shape.kv_heads:
        model = llama(**sizes, kv_heads=shape.kv_heads, hidden=shape.hidden)
    else:
        model = gpt(**sizes, tied=False)
    return model, optax.adamw(LEARNING_RATE)


def global_tokens(shape: Shape, microbatches: int) -> np.ndarray:
    rows = microbatches * shape.rows
    return np.random.default_rng(0).integers(0, shape.vocab, (rows, shape.seq + 1), dtype=np.int32)


def simulated_mesh(shape: Shape) -> Any:
    import jaxshard as js

    js.simulate_devices(shape.stages * shape.data)
    return js.make_mesh(pipe=shape.stages, data=shape.data)


def baseline(shape: Shape, microbatches: int, mesh: Any, model: Any, tx: Any) -> Program:
    import circular_gpipe
    import jax

    repeats = shape.chunks
    step = circular_gpipe.make_step(
        model, tx, mesh, microbatches=microbatches, repeats=repeats, compute_dtype=shape.dtype
    )
    tokens = jax.ShapeDtypeStruct((microbatches * shape.rows, shape.seq + 1), np.int32)
    shapes = circular_gpipe.shapes(model, tx, mesh, repeats)

    def start() -> Step:
        key = jax.random.key(0)
        params = circular_gpipe.fold(jax.jit(model.init)(key), shape.stages, repeats)
        rests = circular_gpipe.shardings(mesh, shapes)
        params, opt_state = jax.device_put((params, tx.init(params)), rests)
        batch = {"tokens": global_tokens(shape, microbatches)}

        def run() -> float:
            nonlocal params, opt_state
            params, opt_state, metrics = jax.block_until_ready(step(params, opt_state, batch, key))
            return float(metrics["loss"])

        return run

    key = jax.eval_shape(lambda: jax.random.key(0))
    return Program(lambda: step.lower(*shapes, {"tokens": tokens}, key), start)


def ours(shape: Shape, microbatches: int, mesh: Any, model: Any, tx: Any) -> Program:
    import jax

    import jaxshard as js

    strategy = js.compose(js.ddp("data"), js.pipeline("pipe", chunks=shape.chunks))
    layout = js.layout(strategy, mesh, model.init, tx)
    engine = js.pipelined(schedule=shape.schedule, microbatches=microbatches, stash="layer", compute_dtype=shape.dtype)
    step = js.make_step(model.loss, tx, layout, engine=engine)
    tokens = jax.ShapeDtypeStruct((microbatches * shape.rows, shape.seq + 1), np.int32)

    def start() -> Step:
        run = js.init(model.init, tx, layout, jax.random.key(0))
        batch = {"tokens": global_tokens(shape, microbatches)}

        def one() -> float:
            nonlocal run
            run, metrics = jax.block_until_ready(step(run, batch))
            return float(metrics["loss"])

        return one

    return Program(lambda: step.lower({"tokens": tokens}), start)


SIDES: dict[str, Callable[..., Program]] = {BASELINE: baseline, OURS: ours}


# What is printed.


def check_gradients(shape: Shape) -> None:
    """Fails unless both have the gradients of one device: loss 1e-6, gradients 1e-5 of each leaf's largest."""
    import circular_gpipe
    import jax
    import jax.numpy as jnp
    import optax

    import jaxshard as js

    small = shape._replace(width=32, heads=4, seq=16, rows=2 * shape.data, vocab=64)
    mesh, microbatches = simulated_mesh(small), 2 * small.stages
    model, _ = model_and_optimizer(small)
    batch, key = {"tokens": global_tokens(small, microbatches)}, jax.random.key(0)
    params = jax.jit(model.init)(key)
    want = jax.jit(jax.value_and_grad(lambda p: model.loss(p, batch, key).value))(params)
    loss = circular_gpipe.make_loss(model, mesh, microbatches=microbatches, repeats=small.chunks)
    folded = circular_gpipe.fold(params, small.stages, small.chunks)
    folded = jax.device_put(folded, circular_gpipe.shardings(mesh, folded))
    value, grads = jax.jit(jax.value_and_grad(loss))(folded, batch, key)
    got = jax.device_get((value, circular_gpipe.unfold(grads)))
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want[1]))
    worst = max(
        float(jnp.abs(x - y).max()) / max(float(jnp.abs(y).max()), 1e-3 * largest)
        for x, y in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True)
    )
    off = abs(float(got[0]) - float(want[0])) / float(want[0])
    print(f"{BASELINE} beside one device: loss {off:.0e} apart, gradients at most {worst:.0e}")
    if not (off <= 1e-6 and worst <= 1e-5):
        raise SystemExit(f"{BASELINE} does not compute the gradients of one device")
    strategy = js.compose(js.ddp("data"), js.pipeline("pipe", chunks=small.chunks))
    engine = js.pipelined(schedule=small.schedule, microbatches=microbatches, stash="layer")
    found = js.parity(model.init, model.loss, optax.sgd(1.0), strategy, mesh, batch, engine=engine)
    print(f"{OURS}: {found.headline}")
    found.check()


def compiled_figures(
    shape: Shape, mesh: Any, counts: Iterable[int], maxtext: str | None = None
) -> dict[str, dict[int, dict[str, float]]]:
    """Sizes and times of the programs for several numbers of micro-batches, with a line for each."""
    print(f"\n| {'':14} |  m | temporaries | peak        | program              | trace CPU-s | compile CPU-s |")
    print(f"|{'-' * 16}|---:|------------:|------------:|----------------------|------------:|--------------:|")
    model, tx = model_and_optimizer(shape)
    on_tpu = mesh.devices.flat[0].platform == "tpu"
    figures: dict[str, dict[int, dict[str, float]]] = {}
    for microbatches in counts:
        for name, side in SIDES.items():
            started = time.process_time()
            lowered = side(shape, microbatches, mesh, model, tx).lower()
            traced = time.process_time()
            compiled = lowered.compile()
            ended = time.process_time()
            text, memory = lowered.as_text(), compiled.memory_analysis()
            found = {
                "temporaries": memory.temp_size_in_bytes,
                "arguments": memory.argument_size_in_bytes,
                **({"peak": memory.peak_memory_in_bytes} if on_tpu else {}),  # the CPU's leaves temporaries out
                "program_bytes": len(text),
                "program_lines": text.count("\n"),
                "trace_cpu_seconds": traced - started,
                "compile_cpu_seconds": ended - traced,
            }
            figures.setdefault(name, {})[microbatches] = found
            program = f"{len(text) / 1e3:.0f} kB, {found['program_lines']:,} lines"
            seconds = f"{traced - started:11.1f} | {ended - traced:13.1f}"
            print(f"| {name:14} | {microbatches:2} | {_megabytes(found)} | {program:20} | {seconds} |", flush=True)
        if maxtext is not None:
            found = maxtext_figures(shape, microbatches, maxtext)
            figures.setdefault("maxtext", {})[microbatches] = found
            seconds = f"{'':11} | {found['cpu_seconds']:13.1f}"
            print(f"| {'maxtext':14} | {microbatches:2} | {_megabytes(found)} | {'':20} | {seconds} |", flush=True)
    return figures


def _megabytes(found: dict[str, float]) -> str:
    return " | ".join(f"{found[name] / 1e6:8.1f} MB" if name in found else " " * 11 for name in ("temporaries", "peak"))


def maxtext_figures(shape: Shape, microbatches: int, topology: str) -> dict[str, float]:
    """What MaxText's own step takes, in a process of its own; tracing is in its seconds."""
    script = Path(__file__).parent / "maxtext_pipeline.py"
    command = [sys.executable, str(script), topology, json.dumps(shape._asdict()), str(microbatches)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    if not lines:
        raise SystemExit(f"maxtext: no figures; its last words:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("FOUND "))


def expected_ratio(shape: Shape, microbatches: int) -> float:
    """Block FLOPs of a step of ours over the baseline's: both do 4 forwards' worth per slot, idle slots included."""
    from jaxshard.schedules import Costs, named

    schedule = named(shape.schedule, shape.stages, microbatches, chunks=shape.chunks)
    slots = 1 / (1 - schedule.stats(Costs(F=1, B=3)).bubble)
    useful = microbatches * shape.chunks
    return slots / ((useful + shape.stages - 1) / useful)


def make_worker(name: str, shape: Shape, microbatches: int, rank: int, meeting: str) -> Step:
    mesh = simulated_mesh(shape)
    return SIDES[name](shape, microbatches, mesh, *model_and_optimizer(shape)).start()


def environment() -> dict[str, str]:
    return {
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "OMP_NUM_THREADS": "1",
    }


def on_topology(shape: Shape, topology: str, maxtext: bool) -> dict[str, Any]:
    """The table for chips that are not here."""
    from jaxshard.compiler.topology import topology_mesh

    mesh = topology_mesh(topology, pipe=shape.stages, data=shape.data)
    accelerator = f"{topology.partition(':')[0]}-{mesh.size}" if maxtext else None
    return compiled_figures(shape, mesh, MEMORY_AT, accelerator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    option: Callable[..., Any] = partial(parser.add_argument, type=int, metavar="N")
    option("--stages", default=4, help="devices of the axis pipe")
    option("--data", default=1, help="devices of the axis data")
    option("--chunks", default=2, help="model stages per device: v")
    option("--blocks", default=16)
    option("--rows", default=4, help="rows of a micro-batch, over all devices of data")
    option("--microbatches", default=8, help="of the steps that are timed")
    option("--rounds", default=6, help="turns of both sides; 0 times nothing")
    option("--steps", default=1, help="steps per turn")
    parser.add_argument("--schedule", default="interleaved", help="of jaxshard")
    parser.add_argument("--topology", metavar="NAME", help="compile for TPUs such as v5e:2x2 instead")
    parser.add_argument("--maxtext", action="store_true", help="with --topology: MaxText's own step beside them")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds == 1 or options.rows % options.data:
        parser.error("at least 2 rounds are needed, and rows that the devices of data divide")
    if options.maxtext and (options.topology is None or importlib.util.find_spec("maxtext") is None):
        parser.error('--maxtext needs --topology, and MaxText: pip install "maxtext[tpu]", on Python 3.12')
    pipe = (options.rows, options.stages, options.data, options.chunks, options.schedule)
    small = Shape(256, options.blocks, 8, 64, *pipe)
    large = Shape(1024, options.blocks, 8, 512, *pipe, vocab=4096, kv_heads=4, hidden=2816, dtype="bfloat16")
    shape = small if options.topology is None else large
    microbatches = options.microbatches
    variants = [
        Variant(name, partial(make_worker, name, shape, microbatches), shape.stages * shape.data, 1, reference)
        for name, reference in ((BASELINE, None), (OURS, BASELINE))
    ]
    if options.worker:
        work(variants, options.worker)
    packages = ["jax", "jaxlib"] + ["libtpu"] * (options.topology is not None) + ["maxtext"] * options.maxtext
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    print(f"{shape}, AdamW")
    figures: dict[str, Any] = {"versions": versions, "shape": shape._asdict()}
    if options.topology is not None:
        figures["compiled"] = on_topology(shape, options.topology, options.maxtext)
    else:
        check_gradients(shape)
        counts = sorted({*MEMORY_AT, *PROGRAM_AT})
        figures["compiled"] = compiled_figures(shape, simulated_mesh(shape), counts)
        if options.rounds:
            figures |= timed(variants, shape, microbatches, options.rounds, options.steps)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def timed(variants: list[Variant], shape: Shape, microbatches: int, rounds: int, steps: int) -> dict[str, Any]:
    """CPU-seconds per step of both, and the ratio that is expected."""
    cores = free_cores(2)
    print(f"\nm={microbatches}; cores {cores or 'not pinned'}; {rounds} rounds of {steps} steps")
    turns = measure(variants, rounds, steps, cores, environment())
    check_losses(turns, variants)
    rows, ratio = report(turns, variants), expected_ratio(shape, microbatches)
    print(f"\nexpected ratio, from the FLOPs of the blocks: {ratio:.3f}")
    return {"timed": rows, "expected_ratio": ratio}


if __name__ == "__main__":
    main()
