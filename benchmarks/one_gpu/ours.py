"""A Llama trained by this package on one device: speed, memory, replica checks, and what a call of the step costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from one_gpu.shape import (
    AT_ONCE,
    BETAS,
    EPSILON,
    LEARNING_RATE,
    NORM_EPSILON,
    ROPE_BASE,
    WEIGHT_DECAY,
    Effort,
    NotAvailable,
    Shape,
    speed,
    time_steps,
)

import jaxshard as js
from jaxshard.checks.replicas import BitSums, Watched
from jaxshard.core.tree import bytes_of, leaf_of
from jaxshard.training.state import run_shapes

EVERY = 10
"""Steps from one check of replicas to the next, the default of `js.ReplicaWatch`."""


class Training:
    """The training of one model on the first device. Weights and moments are f32, products bf16 or what `quant` says.

    Raises:
      NotAvailable: `js.models.make` does not take this `quant`.
    """

    def __init__(self, shape: Shape, quant: str | None = None) -> None:
        self.model = model_of(shape, quant)
        tx = optax.adamw(LEARNING_RATE, b1=BETAS[0], b2=BETAS[1], eps=EPSILON, weight_decay=WEIGHT_DECAY)
        self.layout = js.layout(js.ddp(), js.make_mesh(jax.devices()[:1], data=1), self.model.init, tx)
        shape.check_parameters(sum(x.size for x in jax.tree.leaves(self.layout.shapes.params)))
        engine = js.explicit(compute_dtype=jnp.bfloat16, remat=shape.remat)
        self.step = js.make_step(self.model.loss, tx, self.layout, engine=engine)
        self.run = js.init(self.model.init, tx, self.layout, key=0)
        self.batch = {"tokens": jnp.asarray(shape.tokens())}

    def predict(self) -> js.plan.Prediction:
        step = self.step
        return js.plan.predict(self.layout, step.loss_fn, self.batch, step.engine, tx=step.tx, estimate=True)

    def take(self, count: int) -> float:
        """Take so many steps, wait for every `AT_ONCE`-th, and return the last loss."""
        for number in range(count):
            self.run, metrics = self.step(self.run, self.batch)
            if (number + 1) % AT_ONCE == 0:
                jax.block_until_ready(metrics)
        return float(metrics["loss"])


def model_of(shape: Shape, quant: str | None) -> Any:
    sizes = {
        "vocab": shape.vocab, "width": shape.width, "depth": shape.depth, "heads": shape.heads, "kv_heads": shape.heads,
        "hidden": shape.hidden, "seq": shape.seq, "rope_base": ROPE_BASE, "norm_epsilon": NORM_EPSILON,
    }  # fmt: skip
    if quant is None:
        return js.models.make("llama3-8b", **sizes)
    try:
        return js.models.make("llama3-8b", **sizes, quant=quant)
    except (ImportError, TypeError, ValueError) as error:
        raise NotAvailable(f"quant={quant!r}: {error}") from error


def measure_model(shape: Shape, effort: Effort, quant: str | None, with_replicas: bool) -> Iterator[dict[str, Any]]:
    """Yield the figures of speed and memory, and if asked for those of replica checks."""
    made = Training(shape, quant)
    device = jax.devices()[0]
    compiled = made.step.compile(made.batch)
    predicted, text = made.predict(), compiled.as_text()
    timed = time_steps(made.take, effort)
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    yield speed(shape, timed, device.device_kind) | {
        "attention": "cuDNN's" if "cudnn$fmha" in text else "XLA's products, or another kernel",
        "has_fp8_arrays": "f8e4m3" in text,
        "fp8_products_of_cublas": text.count("__cublas$lt$matmul$f8"),
        "estimated_seconds": None if predicted.time is None else [predicted.time.low, predicted.time.high],
    }
    yield {
        "estimated_bytes": predicted.live_bytes,
        "compiled_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        "peak_bytes": peak,
    }
    if with_replicas:
        yield measure_replicas(made, effort)


def measure_replicas(made: Training, effort: Effort) -> dict[str, Any]:
    """Time steps with and without a check every `EVERY` steps that reads all arrays of the run, in turns.

    One device has no copies to compare. What a check costs a device of `js.ddp` is the program that sums the bits of
    every array; it starts after a step and is read after the next, as `js.ReplicaWatch` does on accelerators.
    """
    leaves = jax.tree_util.tree_leaves_with_path(run_shapes(made.layout))
    watched = tuple(
        Watched(number, leaf_of(path, x), x.sharding.spec, bytes_of(x.shape, x.dtype))
        for number, (path, x) in enumerate(leaves)
    )
    sums, on_cpu = BitSums(made.layout.mesh, watched), jax.devices()[0].platform == "cpu"
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * (effort.rounds + 1)):
        checked = number % 2 == 1
        start = time.perf_counter()
        for place in range(EVERY):
            made.run, metrics = made.step(made.run, made.batch)
            if checked and place == 0:
                if on_cpu:
                    jax.block_until_ready(made.run)
                pending = sums.start(made.run)
            if checked and place == 1:
                assert not sums.find(pending)
        jax.block_until_ready(metrics)
        if number >= 2:  # the first round of each warms up
            seconds[checked].append((time.perf_counter() - start) / EVERY)
    start = time.perf_counter()
    sums.find(sums.start(made.run))
    alone = time.perf_counter() - start
    ratios = [with_check / without for without, with_check in zip(seconds[False], seconds[True], strict=True)]
    return {
        "bytes_read": sum(one.bytes for one in watched),
        "check_seconds": alone,
        "seconds_per_step": statistics.median(seconds[False]),
        "checked_seconds_per_step": statistics.median(seconds[True]),
        "ratio": statistics.median(ratios),
    }


def measure_calls(shape: Shape, effort: Effort) -> Iterator[dict[str, Any]]:
    """Yield the calling thread's CPU time per step beside a plain `jax.jit` of the same program.

    The device is idle at every call, so that no call waits for room in its queue.
    """
    made = Training(shape)
    sides = {"step": made.step, "plain jit": jax.jit(made.step, donate_argnums=0)}
    runs = {"step": made.run, "plain jit": jax.tree.map(jnp.copy, made.run)}
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(effort.rounds + 1):
        for name, step in sides.items():
            seconds = 0.0
            for _ in range(EVERY):
                start = time.thread_time()
                runs[name], metrics = step(runs[name], made.batch)
                seconds += time.thread_time() - start
                jax.block_until_ready((runs[name], metrics))
            if number:  # the first round compiles
                spent[name].append(seconds / EVERY)
    ratios = [mine / theirs for mine, theirs in zip(*spent.values(), strict=True)]
    yield {
        "leaves": len(jax.tree.leaves(runs["step"])),
        "step_microseconds": 1e6 * statistics.median(spent["step"]),
        "plain_jit_microseconds": 1e6 * statistics.median(spent["plain jit"]),
        "ratio": statistics.median(ratios),
    }
