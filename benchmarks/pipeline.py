"""What pipelining costs: `js.pipelined` beside the common circular GPipe (`circular_gpipe.py`), in one run.

    python benchmarks/pipeline.py [--stages 4] [--chunks 2] [--rounds 6] [--json FILE]
    python benchmarks/pipeline.py --topology v5e:2x2 [--maxtext PYTHON]

Both train the same GPT with the same optimizer on the same global batch, cut into the same micro-batches, over the same
devices; blocks lie on the same devices (v chunks here are v repeats there). Both keep a block's input alone and compute
the rest again in the backward pass. Printed are

- the gradients of both beside those of one device, of a small model (it fails above 1e-5),
- temporaries per device, gradients included, for several numbers of micro-batches,
- the lowered program's size, and CPU-seconds to trace and to compile it, at two numbers of micro-batches,
- CPU-seconds per step, as `interleaved.py` takes them, beside the ratio that the FLOPs of the blocks predict: of a
  block four forwards' worth (forward, again, and twice as much backward), as often as the slots of the schedule, idle
  ones too. Simulated devices compute on garbage where a device has nothing to do, as real ones would.

With `--topology` both are compiled for TPUs that are not here instead, a Llama in bf16. With `--maxtext` PYTHON, an
interpreter that has MaxText, its own pipeline with a Llama of the same sizes is compiled beside them
(`maxtext_pipeline.py`).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
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


class Program(NamedTuple):
    """A step that is not compiled yet: its lowered form, and what runs it."""

    lower: Callable[[], Any]
    start: Callable[[], Step]


# Both sides. Imports stand inside functions: a worker is pinned to its cores before any library counts them.


def gpt_and_optimizer(shape: Shape) -> tuple[Any, Any]:
    import optax

    from jaxshard.models.gpt import gpt

    model = gpt(vocab=shape.vocab, width=shape.width, depth=shape.blocks, heads=shape.heads, seq=shape.seq, tied=False)
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
    step = circular_gpipe.make_step(model, tx, mesh, microbatches=microbatches, repeats=repeats)
    tokens = jax.ShapeDtypeStruct((microbatches * shape.rows, shape.seq + 1), np.int32)
    params, opt_state = circular_gpipe.shapes(model, tx, mesh, repeats)

    def start() -> Step:
        key = jax.random.key(0)
        init = jax.jit(model.init)(key)
        params = circular_gpipe.fold(init, shape.stages, repeats)
        params = jax.device_put(params, circular_gpipe.shardings(mesh, params))
        opt_state = jax.device_put(tx.init(params), circular_gpipe.shardings(mesh, opt_state_shapes))
        batch = {"tokens": global_tokens(shape, microbatches)}

        def run() -> float:
            nonlocal params, opt_state
            params, opt_state, metrics = jax.block_until_ready(step(params, opt_state, batch, key))
            return float(metrics["loss"])

        return run

    opt_state_shapes = opt_state
    key = jax.eval_shape(lambda: jax.random.key(0))
    return Program(lambda: step.lower(params, opt_state, {"tokens": tokens}, key), start)


def ours(shape: Shape, microbatches: int, mesh: Any, model: Any, tx: Any) -> Program:
    import jax

    import jaxshard as js

    strategy = js.compose(js.ddp("data"), js.pipeline("pipe", chunks=shape.chunks))
    layout = js.layout(strategy, mesh, model.init, tx)
    engine = js.pipelined(schedule=shape.schedule, microbatches=microbatches, stash="layer")
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
    model, _ = gpt_and_optimizer(small)
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


def compiled_figures(shape: Shape, mesh: Any, model: Any, tx: Any, counts: Iterator[int]) -> dict[str, dict[int, Any]]:
    """Sizes and times of both sides' programs for several numbers of micro-batches, with a line for each."""
    print(f"\n| {'':14} |  m | temporaries | program           | trace CPU-s | compile CPU-s |")
    print(f"|{'-' * 16}|---:|------------:|-------------------|------------:|--------------:|")
    figures: dict[str, dict[int, Any]] = {name: {} for name in SIDES}
    for microbatches in counts:
        for name, side in SIDES.items():
            started = time.process_time()
            lowered = side(shape, microbatches, mesh, model, tx).lower()
            traced = time.process_time()
            compiled = lowered.compile()
            ended = time.process_time()
            memory, text = compiled.memory_analysis(), lowered.as_text()
            found = {
                "temporaries": memory.temp_size_in_bytes,
                "peak": memory.peak_memory_in_bytes,
                "program_bytes": len(text),
                "program_lines": text.count("\n"),
                "trace_cpu_seconds": traced - started,
                "compile_cpu_seconds": ended - traced,
            }
            figures[name][microbatches] = found
            program = f"{len(text) / 1e3:.0f} kB, {text.count(chr(10)):,} lines"
            print(
                f"| {name:14} | {microbatches:2} | {memory.temp_size_in_bytes / 1e6:8.1f} MB | {program:17} "
                f"| {traced - started:11.1f} | {ended - traced:13.1f} |",
                flush=True,
            )
    return figures


def expected_ratio(shape: Shape, microbatches: int) -> float:
    """Block FLOPs of a step of ours over the baseline's: both do 4 forwards' worth per slot, idle slots included."""
    from jaxshard.schedules import Costs, named

    schedule = named(shape.schedule, shape.stages, microbatches, chunks=shape.chunks)
    slots = 1 / (1 - schedule.stats(Costs(F=1, B=3)).bubble)
    useful = microbatches * shape.chunks
    return slots / ((useful + shape.stages - 1) / useful)


def make_worker(name: str, shape: Shape, microbatches: int, rank: int, meeting: str) -> Step:
    mesh = simulated_mesh(shape)
    return SIDES[name](shape, microbatches, mesh, *gpt_and_optimizer(shape)).start()


def environment() -> dict[str, str]:
    return {
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "OMP_NUM_THREADS": "1",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    option: Callable[..., Any] = partial(parser.add_argument, type=int, metavar="N")
    option("--stages", default=4, help="devices of the axis pipe")
    option("--data", default=1, help="devices of the axis data")
    option("--chunks", default=2, help="model stages per device: v")
    option("--width", default=256)
    option("--blocks", default=16)
    option("--heads", default=8)
    option("--seq", default=64)
    option("--rows", default=4, help="rows of a micro-batch, over all devices of data")
    option("--microbatches", default=8, help="of the steps that are timed")
    option("--rounds", default=6, help="turns of both sides; 0 times nothing")
    option("--steps", default=1, help="steps per turn")
    parser.add_argument("--schedule", default="interleaved", help="of jaxshard")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds == 1 or options.rows % options.data:
        parser.error("at least 2 rounds are needed, and rows that the devices of data divide")
    shape = Shape(
        options.width, options.blocks, options.heads, options.seq, options.rows, options.stages, options.data,
        options.chunks, options.schedule,
    )  # fmt: skip
    microbatches = options.microbatches
    variants = [
        Variant(name, partial(make_worker, name, shape, microbatches), shape.stages * shape.data, 1, reference)
        for name, reference in ((BASELINE, None), (OURS, BASELINE))
    ]
    if options.worker:
        work(variants, options.worker)
    versions = {"python": platform.python_version()} | {name: version(name) for name in ("jax", "jaxlib")}
    print(", ".join(f"{name} {value}" for name, value in versions.items()))
    print(f"{shape}, f32, AdamW")
    check_gradients(shape)
    model, tx = gpt_and_optimizer(shape)
    figures: dict[str, Any] = {"versions": versions, "shape": shape._asdict()}
    counts = sorted({*MEMORY_AT, *PROGRAM_AT})
    figures["compiled"] = compiled_figures(shape, simulated_mesh(shape), model, tx, counts)
    if options.rounds:
        cores = free_cores(2)
        print(f"\nm={microbatches}; cores {cores or 'not pinned'}; {options.rounds} rounds of {options.steps} steps")
        turns = measure(variants, options.rounds, options.steps, cores, environment())
        check_losses(turns, variants)
        figures["timed"] = report(turns, variants)
        figures["expected_ratio"] = expected_ratio(shape, microbatches)
        print(f"\nexpected ratio, from the FLOPs of the blocks: {figures['expected_ratio']:.3f}")
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
