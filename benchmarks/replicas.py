"""Flipped bits in copies that must be equal: how many `js.ReplicaWatch` finds, false alarms, and what a check costs.

    python benchmarks/replicas.py [--flips 200] [--clean 1000] [--seed 0] [--json FILE]
    python benchmarks/replicas.py --cost [--topology v5e:16x16] [--json FILE]         # libtpu for the topology

The first command starts two processes of four simulated devices each, which talk over loopback, and trains a small
model under four layouts: `js.ddp`, `js.zero2`, `js.hsdp` in two groups, and `js.fsdp` beside `js.tensor`. Arrays,
devices, elements, bits and the number of clean steps before are drawn at random. A flip changes one bit in the copy
that one device holds. A check before the next step has to name that array and that device (of two copies both of them).
Then a step is taken with the flipped run, and the check after it has to name exactly the arrays and devices whose bytes
differ: all bytes of all copies are exchanged and compared, without checksums. Some flips vanish by rounding. Clean
steps are trained by `js.fit` with a check after every one.

The second command counts: bytes that a device reads and integer operations for a check, those of a training step as the
compiler counts them, and the share of a step if there is a check every 10 steps. The compiler counts the body of a loop
once, so blocks are not scanned here but written out. With `--topology` the step is one for chips that are not here, and
the check of a 7B model is compiled for them too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import jaxshard as js
from jaxshard.checks.replicas import Watched, copy_groups, list_watched, sums_program
from jaxshard.core.keys import keys_of, words_of

PROCESSES, DEVICES = 2, 8
EVERY = 10
TARGET = 0.02
"""The share of a step's bytes and operations that checks may add where there is one every `EVERY` steps."""


def init_fn(key: jax.Array) -> js.Model:
    """A model with f32, bf16, integers, and state of its own."""
    keys = jax.random.split(key, 3)
    params = {
        "embed": jax.random.normal(keys[0], (64, 32)),
        "up": {"kernel": jax.random.normal(keys[1], (32, 64)) / 6, "bias": jnp.zeros(64)},
        "down": {"kernel": (jax.random.normal(keys[2], (64, 16)) / 8).astype(jnp.bfloat16), "bias": jnp.zeros(16)},
    }
    return js.Model(params, {"mean": jnp.zeros(64), "count": jnp.zeros((), jnp.int32), "seen": jnp.zeros(3, bool)})


def loss_fn(model: js.Model, batch: Any, key: jax.Array) -> js.Loss:
    params = model.params
    x = params["embed"][batch["tokens"]]
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    y = hidden @ params["down"]["kernel"].astype(jnp.float32) + params["down"]["bias"]
    state = model.state | {"mean": 0.9 * model.state["mean"] + 0.1 * hidden.mean(axis=0)}
    return js.Loss(js.Mean(jnp.square(y - batch["y"]).sum(), y.size), state=state)


TX = optax.adamw(1e-2)


def layouts() -> dict[str, js.Layout]:
    """Four layouts that hold arrays several times."""
    rules = [("up/kernel", ("embed", "mlp")), ("down/kernel", ("mlp", "embed")), *js.RULES]
    tensor = js.compose(js.fsdp("data", min_size=1500), js.tensor(rules))
    chosen = {
        "ddp": (js.ddp("data"), {"data": 8}),
        "zero2": (js.zero2("data", min_size=0), {"data": 8}),
        "hsdp": (js.hsdp("replica", "data", min_size=0), {"replica": 2, "data": 4}),
        "fsdp x tensor": (tensor, {"data": 4, "tensor": 2}),
    }
    return {name: js.layout(how, js.make_mesh(**axes), init_fn, TX) for name, (how, axes) in chosen.items()}


class Rows:
    """The data: rows that depend on the number of the step alone."""

    batch = 16

    def rows(self, step: int, rows: Any) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        tokens, y = rng.integers(0, 64, self.batch, dtype=np.int32), rng.normal(size=(self.batch, 16))
        return {"tokens": tokens[rows], "y": y.astype(np.float32)[rows]}


def flip(run: js.TrainState, watched: Watched, device: int, element: int, bit: int) -> js.TrainState:
    """Flip one bit of the copy of an array that one device holds; the other devices keep their own arrays."""
    leaves, structure = jax.tree.flatten(run)
    words = words_of(leaves[watched.number])
    parts = []
    for shard in words.addressable_shards:
        data = shard.data
        if shard.device.id == device:
            host = np.array(data)
            bits = host.reshape(-1).view(np.uint8)
            bits[element * host.itemsize + bit // 8] ^= 1 << bit % 8
            data = jax.device_put(host, shard.device)
        parts.append(data)
    made = jax.make_array_from_single_device_arrays(words.shape, words.sharding, parts)
    leaves[watched.number] = keys_of(made, leaves[watched.number].dtype)
    flipped: js.TrainState = jax.tree.unflatten(structure, leaves)
    return flipped


Found = dict[str, tuple[int, ...]]
"""Paths of arrays, each with the ids of the devices that are named."""


def differing(run: js.TrainState, layout: js.Layout) -> Found:
    """Find what differs by all bytes of all copies, exchanged between the processes."""
    leaves, mesh = jax.tree.leaves(run), layout.mesh
    order = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    contents: dict[Any, list[bytes]] = {device: [] for device in order}
    watched = list_watched(layout)
    for one in watched:
        for shard in words_of(leaves[one.number]).addressable_shards:
            contents[shard.device].append(np.asarray(shard.data).tobytes())
    sizes = [len(content) for content in contents[order[0]]]
    mine = np.stack([np.frombuffer(b"".join(contents[device]), np.uint8) for device in order])
    everything = multihost_utils.process_allgather(mine).reshape(-1, sum(sizes))
    by_process = sorted(mesh.devices.flat, key=lambda device: device.process_index)
    row_of = {device: row for row, device in enumerate(by_process)}
    found = {}
    for one, end, size in zip(watched, itertools.accumulate(sizes), sizes, strict=True):
        named: list[int] = []
        for group in copy_groups(mesh, one.spec):
            holders = [mesh.devices.flat[position] for position in group]
            copies = [everything[row_of[device], end - size : end].tobytes() for device in holders]
            common = max(set(copies), key=copies.count)
            if len(set(copies)) > 1:
                majority = 2 * copies.count(common) > len(copies)
                named += [d.id for d, x in zip(holders, copies, strict=True) if x != common or not majority]
        if named:
            found[one.leaf.path] = tuple(sorted(named))
    return found


def reported(run: js.TrainState, layout: js.Layout) -> Found:
    """Find what differs by a check; the message has to name what the attributes do."""
    try:
        js.check_replicas(run, layout)
    except js.ReplicasDiffer as error:
        found: Found = {}
        for leaf, _, differ in error.differences:
            assert leaf.path in str(error)
            assert all(f"device {device.id} of process {device.process_index}" in str(error) for device in differ[:4])
            found[leaf.path] = tuple(sorted([*found.get(leaf.path, ()), *(device.id for device in differ)]))
        return found
    return {}


def worker(flips: int, clean: int, seed: int) -> dict[str, Any]:
    """Train, flip and check, in every process at once; each knows all results."""
    rng = np.random.default_rng(seed)
    counts = dict.fromkeys(("flips", "found", "vanished", "still there", "still there, found", "false alarms"), 0)
    by_layout: dict[str, int] = {}
    steps_before = clean_steps = 0
    missed: list[str] = []
    for number, (name, layout) in enumerate(layouts().items()):
        step = js.make_step(loss_fn, TX, layout, engine=js.explicit(), donate=False)  # flips need the run before
        run, watched = js.init(init_fn, TX, layout, number), list_watched(layout)
        rows = iter(js.batches(Rows(), layout))
        share = flips // 4 + (number < flips % 4)
        for _ in range(share):
            for _ in range(int(rng.integers(0, 4))):
                run, _ = step(run, next(rows))
                steps_before += 1
                counts["false alarms"] += bool(reported(run, layout))
            target = watched[rng.integers(len(watched))]
            words = words_of(jax.tree.leaves(run)[target.number])
            shape = words.sharding.shard_shape(words.shape)
            device = int(layout.mesh.devices.flat[rng.integers(DEVICES)].id)
            element = int(rng.integers(np.prod(shape, dtype=int)))
            bit = 0 if words.dtype == bool else int(rng.integers(8 * words.dtype.itemsize))
            wrong = flip(run, target, device, element, bit)
            truth, found = differing(wrong, layout), reported(wrong, layout)
            assert list(truth) == [target.leaf.path] and device in truth[target.leaf.path], "the flip is there"
            counts["flips"] += 1
            counts["found"] += found == truth
            by_layout[name] = by_layout.get(name, 0) + (found == truth)
            if found != truth:
                missed.append(f"{name} {target.leaf.path} device {device} element {element} bit {bit}: {found}")
            wrong, _ = step(wrong, next(rows))
            jax.block_until_ready(wrong)
            truth, found = differing(wrong, layout), reported(wrong, layout)
            counts["vanished"] += not truth
            counts["still there"] += bool(truth)
            counts["still there, found"] += bool(truth) and found == truth
            counts["false alarms"] += bool(found) and not truth
        watch = js.ReplicaWatch(layout, every=1)  # raises at a false alarm
        steps = clean // 4 + (number < clean % 4)
        js.fit(js.init(init_fn, TX, layout, 7), step, js.batches(Rows(), layout), steps=steps, on_run=[watch])
        assert watch.clean == (steps or None)
        clean_steps += steps
    return {
        **counts,
        "found by layout": by_layout,
        "missed": missed,
        "clean steps by fit": clean_steps,
        "clean steps between flips": steps_before,
    }


def launch(flips: int, clean: int, seed: int) -> dict[str, Any]:
    """Start the processes, and return what they found; both have to have found the same."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
        free.close()
        path = str(Path(__file__).parent.parent)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(DEVICES // PROCESSES),
            "PYTHONPATH": path,
            "JAXSHARD_COORDINATOR_ADDRESS": address,
            "JAXSHARD_NUM_PROCESSES": str(PROCESSES),
        }
        files = [Path(folder) / f"{index}.json" for index in range(PROCESSES)]
        words = [sys.executable, __file__, "--flips", str(flips), "--clean", str(clean), "--seed", str(seed)]
        started = [
            subprocess.Popen([*words, "--worker", str(file)], env=environment | {"JAXSHARD_PROCESS_ID": str(index)})
            for index, file in enumerate(files)
        ]
        statuses = [process.wait() for process in started]
        if any(statuses):
            raise SystemExit(f"the processes ended with {statuses}")
        results: list[dict[str, Any]] = [json.loads(file.read_text()) for file in files]
    assert results[0] == results[1], "every process finds the same"
    return results[0]


def write_out(model: js.Stacked) -> tuple[Any, Any]:
    """Return init and loss of a ready-made model whose blocks are written out, not scanned."""

    def init(key: jax.Array) -> Any:
        return model.init(key)

    def loss(params: Any, batch: Any, key: Any) -> Any:
        ends = {name: params[name] for name in ("embed", "head")}
        x = model.embed(ends, batch, key)
        for number in range(model.num_blocks):
            x = model.block(jax.tree.map(lambda w, number=number: w[number], params["blocks"]), x, key)
        return model.head(ends, x, batch, key)

    return init, loss


def read_cost(compiled: Any) -> dict[str, float]:
    found = compiled.cost_analysis()
    return {"bytes": float(found["bytes accessed"]), "operations": float(found["flops"])}


def measure_cost(topology: str | None) -> list[dict[str, Any]]:
    """Count what a check and a step cost."""
    rows = []
    meshes = {"ddp": {"data": 8}, "zero2": {"data": 8}, "hsdp": {"replica": 2, "data": 4}}
    strategies = {"ddp": js.ddp("data"), "zero2": js.zero2("data"), "hsdp": js.hsdp("replica", "data")}
    size = js.models.SIZES["gpt-1m"]
    for name, strategy in strategies.items():
        axes = meshes[name]
        mesh = js.plan.topology_mesh("v5e:2x4", **axes) if topology else js.make_mesh(**axes)
        model = js.models.make("gpt-1m")
        tx = optax.adamw(1e-3)
        init, loss = write_out(model)
        layout = js.layout(strategy, mesh, init, tx)
        batch = {"tokens": jax.ShapeDtypeStruct((size.recipe.batch, size.shape["seq"] + 1), jnp.int32)}
        step = read_cost(js.make_step(loss, tx, layout, engine=js.explicit()).compile(batch))
        rows.append(row(f"gpt-1m, default batch, {name}", layout, step))
    if topology:
        mesh = js.plan.topology_mesh(topology, replica=2, data=128)
        model = js.models.make("llama2-7b")
        rows.append(row("llama2-7b, hsdp 2 x 128", js.layout(js.hsdp("replica", "data"), mesh, model.init, tx), None))
        mesh = js.plan.topology_mesh(topology, data=16, tensor=16)
        how = js.compose(js.zero2("data"), js.tensor())
        rows.append(row("llama2-7b, zero2 x tensor", js.layout(how, mesh, model.init, tx), None))
    return rows


def row(name: str, layout: js.Layout, step: dict[str, float] | None) -> dict[str, Any]:
    watched = list_watched(layout)
    started = time.perf_counter()
    compiled = sums_program(layout.mesh, watched).compile()
    check, memory = read_cost(compiled), compiled.memory_analysis()
    found: dict[str, Any] = {
        "case": name,
        "platform": layout.mesh.devices.flat[0].platform,
        "arrays": len(watched),
        "held bytes": sum(one.bytes for one in watched),
        "gathered bytes": 4 * len(watched) * layout.mesh.size,
        "check": check,
        "temporaries": memory.temp_size_in_bytes if memory else None,
        "compile seconds": time.perf_counter() - started,
        "step": step,
    }
    if step is not None:
        found["share"] = {kind: check[kind] / EVERY / step[kind] for kind in check}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--clean", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the flips")
    parser.add_argument("--cost", action="store_true", help="count what a check costs instead")
    parser.add_argument("--topology", help="of TPUs, for --cost")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        js.distributed.initialize()
        Path(args.worker).write_text(json.dumps(worker(args.flips, args.clean, args.seed)))
        return
    result: dict[str, Any] = {"jax": jax.__version__}
    if args.cost:
        if not args.topology:
            js.simulate_devices(8)
        result["cost"] = measure_cost(args.topology)
        for one in result["cost"]:
            share = {kind: f"{part:.2%}" for kind, part in one.get("share", {}).items()}
            print(
                f"{one['case']}: {one['arrays']} arrays, {one['held bytes']:,} bytes held, "
                f"read {one['check']['bytes']:,.0f}, {one['check']['operations']:,.0f} operations, "
                f"temporaries {one['temporaries']:,}, gathered {one['gathered bytes']:,}; "
                f"of a step, every {EVERY}: {share}"
            )
    else:
        result |= launch(args.flips, args.clean, args.seed)
        print("\n".join(f"{name}: {value}" for name, value in result.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
