"""What a step of `js.make_step` costs beyond one written by hand: CPU-seconds, paired, and what both compiled to.

    python benchmarks/step_overhead.py [--rounds 21] [--size many] [--steps 20] [--json FILE]

The step by hand is a plain `jax.jit` of loss, gradients, optax's update and the gradients' global norm, with the same
NamedShardings for parameters, AdamW's state and batch on 8 simulated CPU devices, and donated. The transformer's
activations are constrained to their rows, without which the partitioner moves three times the bytes. Beside it stands
one written with `shard_map`: every weight gathered, every gradient reduce-scattered. Of ours there are, per engine:

- as it is: "update_norm" and the guard against steps that are not finite, with "bad", on top of what the hand returns;
- unguarded: `guarded=False`, without "bad";
- loss alone: `metrics=("loss",)` and unguarded, whose ratio is to a step by hand without the gradients' norm;
- same outputs: unguarded in a program of one's own that returns loss and gradient norm alone, so that the compiler
  drops the norm of the update.

All competitors live in one process and take turns of a few steps, in another order each round. A turn's figure is the
CPU time of all threads (`time.process_time`); ratios are taken within a round, and their median is reported. The guard
is the median of (guarded - unguarded) / by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.core.collectives import gather
from jaxshard.core.constrain import follow_layout
from jaxshard.core.layout import human_bytes
from jaxshard.hlo import hlo
from jaxshard.hlo.found import collectives, summary
from jaxshard.models.gpt import gpt

DEVICES = 8
HAND = "by hand"
HAND_LOSS = "by hand, loss alone"
TARGETS = {"explicit": 1.05, "auto": 1.10}


class Problem(NamedTuple):
    """What is trained: parameters, their loss and one global batch. `total` gives the loss by hand as a scalar."""

    init_fn: Callable[[jax.Array], Any]
    loss_fn: Callable[[Any, Any, jax.Array], js.Mean]
    batch: Any
    steps: int


def layers(count: int, width: int, rows: int, steps: int, *, bias: bool) -> Problem:
    """A residual stack of `count` matrices [width, width], unrolled, with or without a bias each."""

    def init_fn(key: jax.Array) -> Any:
        keys = jax.random.split(key, count)
        start = {f"w{i:03}": jax.random.normal(k, (width, width)) / width**0.5 for i, k in enumerate(keys)}
        return start | ({f"b{i:03}": jnp.zeros(width) for i in range(count)} if bias else {})

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> js.Mean:
        x = batch["x"]
        for i in range(count):
            x = x + jnp.tanh(x @ params[f"w{i:03}"] + (params[f"b{i:03}"] if bias else 0.0))
        return js.Mean(jnp.square(x - batch["y"]).sum(), x.size)

    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(rows, width)).astype(np.float32) for name in "xy"}
    return Problem(init_fn, loss_fn, batch, steps)


def transformer(steps: int) -> Problem:
    """A GPT whose blocks run in one `lax.scan`."""
    model = gpt(vocab=256, width=128, depth=6, heads=4, seq=64)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 65), dtype=np.int32)
    return Problem(model.init, model.loss, {"tokens": tokens}, steps)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "many": lambda: layers(64, 64, 64, 10, bias=True),
    "large": lambda: layers(4, 512, 64, 20, bias=False),
    "scanned": lambda: transformer(6),
}

Step = Callable[[], dict[str, jax.Array]]


class Competitor(NamedTuple):
    """A step that runs when called, what it was compiled to, and the bytes per device that are donated to it."""

    step: Step
    compiled: Any
    donated_bytes: int
    mesh: jax.sharding.Mesh


def competitors(problem: Problem) -> dict[str, Competitor]:
    tx = optax.adamw(1e-3)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=DEVICES), problem.init_fn, tx)
    found = {HAND: by_hand(problem, tx, layout), "by hand, shard_map": by_hand(problem, tx, layout, manual=True)}
    found[HAND_LOSS] = by_hand(problem, tx, layout, norm=False)
    for engine in (js.explicit(), js.auto()):
        for guarded in (True, False):
            name = engine.name if guarded else f"{engine.name} unguarded"
            found[name] = ours(problem, tx, layout, engine, guarded)
        found[f"{engine.name} loss alone"] = ours(problem, tx, layout, engine, False, metrics=("loss",))
        found[f"{engine.name} same outputs"] = same_outputs(problem, tx, layout, engine)
    return found


def by_hand(
    problem: Problem, tx: optax.GradientTransformation, layout: js.Layout, *, manual: bool = False, norm: bool = True
) -> Competitor:
    """The step as one writes it with `jax.jit`, or with `shard_map`; of the layout only the NamedShardings.

    `norm` returns the norm of the gradients too.
    """
    shardings = layout.shardings(layout.params), layout.shardings(layout.opt_state)
    batch_shardings, scalar = layout.batch_shardings(problem.batch), NamedSharding(layout.mesh, P())
    batch = jax.device_put(problem.batch, batch_shardings)

    def loss_of(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        with follow_layout(layout):  # so that what the model says of its activations holds here, too
            mean = problem.loss_fn(params, batch, key)
        return mean.totals[0] / mean.weights[0]

    def on_device(params: Any, batch: Any, key: jax.Array) -> Any:
        def share(params: Any) -> jax.Array:
            whole = jax.tree.map(lambda x, s: gather(x, s.spec), params, shardings[0])
            mean = problem.loss_fn(whole, batch, key)
            return mean.totals[0] / jax.lax.psum(mean.weights[0], "data")

        loss, grads = jax.value_and_grad(share)(params)
        return jax.lax.psum(loss, "data"), grads

    specs = jax.tree.map(lambda s: s.spec, (shardings[0], batch_shardings))
    spread = jax.shard_map(
        on_device, mesh=layout.mesh, in_specs=(*specs, P()), out_specs=(P(), specs[0]), check_vma=False
    )
    loss_and_grads = spread if manual else jax.value_and_grad(loss_of)

    def update(params: Any, opt_state: Any, batch: Any, key: jax.Array) -> Any:
        loss, grads = loss_and_grads(params, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": loss} | ({"grad_norm": optax.global_norm(grads)} if norm else {})
        return optax.apply_updates(params, updates), opt_state, metrics

    key = jax.device_put(jax.random.key(0), scalar)
    run = js.init(problem.init_fn, tx, layout, 0)
    params, opt_state = run.params, run.opt_state
    jitted = jax.jit(
        update,
        in_shardings=(*shardings, batch_shardings, scalar),
        out_shardings=(*shardings, scalar),
        donate_argnums=(0, 1),
    )
    compiled = jitted.lower(params, opt_state, batch, key).compile()

    def step() -> dict[str, jax.Array]:
        nonlocal params, opt_state
        params, opt_state, metrics = compiled(params, opt_state, batch, key)
        return jax.block_until_ready(metrics)

    return Competitor(step, compiled, _bytes((params, opt_state)), layout.mesh)


def ours(
    problem: Problem,
    tx: optax.GradientTransformation,
    layout: js.Layout,
    engine: Any,
    guarded: bool,
    metrics: tuple[str, ...] = ("loss", "grad_norm", "update_norm"),
) -> Competitor:
    batch = jax.device_put(problem.batch, layout.batch_shardings(problem.batch))
    made = js.make_step(problem.loss_fn, tx, layout, engine=engine, guarded=guarded, metrics=metrics)
    run = js.init(problem.init_fn, tx, layout, 0)
    compiled = made.compile(batch)

    def step() -> dict[str, jax.Array]:
        nonlocal run
        run, metrics = made(run, batch)
        return jax.block_until_ready(metrics)

    return Competitor(step, compiled, _bytes((run.params, run.opt_state)), layout.mesh)


def same_outputs(problem: Problem, tx: optax.GradientTransformation, layout: js.Layout, engine: Any) -> Competitor:
    batch = jax.device_put(problem.batch, layout.batch_shardings(problem.batch))
    made = js.make_step(problem.loss_fn, tx, layout, engine=engine, guarded=False)
    run = js.init(problem.init_fn, tx, layout, 0)

    def with_two_metrics(run: js.TrainState, batch: Any) -> tuple[js.TrainState, dict[str, jax.Array]]:
        run, metrics = made(run, batch)
        return run, {name: metrics[name] for name in ("loss", "grad_norm")}

    compiled = jax.jit(with_two_metrics, donate_argnums=0).lower(run, batch).compile()

    def step() -> dict[str, jax.Array]:
        nonlocal run
        run, metrics = compiled(run, batch)
        return jax.block_until_ready(metrics)

    return Competitor(step, compiled, _bytes((run.params, run.opt_state)), layout.mesh)


def _bytes(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def measure(found: dict[str, Competitor], rounds: int, steps: int) -> dict[str, list[float]]:
    """CPU-milliseconds per step of every competitor in each round; all must have the same losses."""
    figures: dict[str, list[float]] = {name: [] for name in found}
    order, losses = list(found), {}
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)
        for name in order:
            start = time.process_time()
            for _ in range(steps):
                metrics = found[name].step()
            took = (time.process_time() - start) / steps * 1e3
            losses[name] = float(metrics["loss"]), float(metrics.get("grad_norm", np.nan))
            if number:  # the first round warms up
                figures[name].append(took)
        for name, values in () if number else losses.items():  # later ones drift apart by rounding
            expected = losses[HAND_LOSS if name.endswith("loss alone") else HAND]
            np.testing.assert_allclose(values, expected, rtol=1e-3, err_msg=f"{name} trains something else")
    return figures


def report(size: str, figures: dict[str, list[float]], found: dict[str, Competitor]) -> dict[str, Any]:
    """Print a size's table and return its rows."""
    rows = {}
    for name, took in figures.items():
        base = figures[HAND_LOSS if name.endswith("loss alone") else HAND]
        ratios = [mine / hand for mine, hand in zip(took, base, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        row = {"cpu_ms": statistics.median(took), "ratio": ratio, "quartiles": [low, high]}
        if f"{name} unguarded" in figures:
            pairs = zip(took, figures[f"{name} unguarded"], base, strict=True)
            row["guard"] = statistics.median((mine - without) / hand for mine, without, hand in pairs)
        rows[name] = row | counts(found[name])
    print(f"\n{size}\n")
    print(f"| {'':21} | CPU-ms | ratio | quartiles   |  guard | target  | instructions | copies | collectives |")
    print(f"|{'-' * 23}|-------:|------:|-------------|-------:|---------|-------------:|-------:|-------------|")
    for name, row in rows.items():
        low, high = row["quartiles"]
        guard = f"{row['guard']:6.3f}" if "guard" in row else ""
        target = f"<= {TARGETS[name]:.2f}" if name in TARGETS else ""
        moved = ", ".join(f"{count} {kind} {human_bytes(size)}" for kind, (count, size) in row["collectives"].items())
        print(
            f"| {name:21} | {row['cpu_ms']:6.2f} | {row['ratio']:5.3f} | {low:.3f}-{high:.3f} | {guard:6} | {target:7} "
            f"| {row['instructions']:12,} | {row['opcodes'].get('copy', 0):6} | {moved} |"
        )
    return rows


_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "partition-id"}


def counts(one: Competitor) -> dict[str, Any]:
    """What a step compiled to: the instructions that run, by opcode, collectives, and bytes updated in place."""
    module = hlo.parse(one.compiled.as_text())
    inlined = {
        name
        for computation in module.computations.values()
        for op in map(computation.__getitem__, computation.lines)
        if op.opcode != "while" and op.opcode != "conditional" and op.opcode != "call"
        for name in op.callees
    }
    names = Counter(
        computation[op].opcode
        for computation in module.computations.values()
        if computation.name not in inlined
        for op in computation.lines
    )
    for name in _FREE:
        names.pop(name, None)
    moved = collectives(one.compiled, one.mesh)
    traffic = {row.kind: [row.count, row.bytes] for row in summary(moved)}
    aliased = one.compiled.memory_analysis().alias_size_in_bytes
    return {
        "instructions": names.total(),
        "opcodes": dict(names.most_common()),
        "collectives": traffic,
        "temporaries": one.compiled.memory_analysis().temp_size_in_bytes,
        "donated": [aliased, one.donated_bytes],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--steps", type=int, help="steps per turn; by default the size's own")
    parser.add_argument("--size", choices=PROBLEMS, action="append", help="by default all")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    js.simulate_devices(DEVICES)
    print(f"python {platform.python_version()}, jax {version('jax')}, {DEVICES} devices on {os.cpu_count()} cores")
    results = {}
    for size in options.size or PROBLEMS:
        problem = PROBLEMS[size]()
        found = competitors(problem)
        figures = measure(found, options.rounds, options.steps or problem.steps)
        results[size] = report(size, figures, found)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
