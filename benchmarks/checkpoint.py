"""How long a save blocks the training loop, what the checksums cost, and what Orbax alone takes for the same 1 GB.

    python benchmarks/checkpoint.py [--width 1024] [--depth 16] [--rounds 3] [--orbax-rounds 7] [--folder DIR]
        [--json FILE]

Eight simulated CPU devices hold stacked matrices and Adam's state under FSDP and in a pipeline; each figure is the
median of the rounds. The folder should lie on the disk that counts; a warm page cache makes reads look fast.

Then 1 GB under FSDP is saved and restored by `js.save` and `js.restore`, and by Orbax's own `StandardCheckpointer`,
which computes no checksums of files and does not flush them to the disk. The two take turns, each round the other one
first, and the ratio of each round is taken before the median, so that whoever else loads the machine loads both.
Besides seconds of the clock there are those of the CPU, which depend less on others, and the peak of memory above what
was used before, with the restored run in it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js
from jaxshard.checkpoint.checksums import find_damage


def model(width: int, depth: int) -> js.Stacked:
    def init(key: jax.Array) -> Any:
        return {
            "embed": {"w": jnp.ones((width, 8))},
            "block": {"w": jax.random.normal(key, (width, width))},
            "head": {},
        }

    def block(params: Any, x: jax.Array, key: Any) -> jax.Array:
        return x @ params["w"]

    def head(params: Any, x: jax.Array, batch: Any, key: Any) -> js.Mean:
        return js.Mean(x.sum(), 1.0)

    return js.Stacked(lambda params, batch, key: batch["x"], block, head, num_blocks=depth, init=init)


def timed(fn: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = fn()
    return time.perf_counter() - start, result


def measure(folder: Path, run: js.TrainState, layout: js.Layout) -> dict[str, float]:
    """Seconds of one save of each kind, and of reading back."""
    shutil.rmtree(folder, ignore_errors=True)

    def at(step: int) -> js.TrainState:
        return run._replace(step=jax.device_put(np.int32(step), run.step.sharding))

    first, second = jax.block_until_ready((at(1), at(2)))
    whole, _ = timed(lambda: js.save(folder, first, layout))
    with js.Checkpointer(folder, layout, every=1) as checkpointer:
        blocked, _ = timed(lambda: checkpointer(2, second))
        rest, _ = timed(checkpointer.wait_until_finished)
    checked, problems = timed(lambda: find_damage(folder / "1"))
    assert not problems
    restored, back = timed(lambda: jax.block_until_ready(js.restore(folder, layout)))
    unchecked, _ = timed(lambda: jax.block_until_ready(js.restore(folder, layout, verify=False)))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (back.params, run.params))))
    return {
        "save": whole,
        "background save, blocked": blocked,
        "background save, rest": rest,
        "verify": checked,
        "restore": restored,
        "restore, unverified": unchecked,
    }


def memory_kb(field: str) -> int:
    """Kilobytes of this process: VmRSS now, VmHWM at most since the last reset."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def cost(fn: Callable[[], Any]) -> dict[str, float]:
    """Seconds, CPU seconds and peak memory of a call, with what it returns."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before would count as used already
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM
    before, cpu = memory_kb("VmRSS"), time.process_time()
    seconds, result = timed(lambda: jax.block_until_ready(fn()))
    peak = memory_kb("VmHWM") - before
    del result
    return {"seconds": seconds, "CPU seconds": time.process_time() - cpu, "peak GB": peak / 1e6}


def beside_orbax(root: Path, rounds: int) -> dict[str, Any]:
    """Save and restore 1 GB by ours and by Orbax in turns; the medians, and those of the ratios of each round."""
    import orbax.checkpoint as ocp

    made, tx = model(2048, 20), optax.adam(1e-3)
    layout = js.layout(js.fsdp("data"), js.make_mesh(data=8), made.init, tx)
    run = jax.block_until_ready(js.init(made.init, tx, layout, 0))
    arrays = run._replace(key=jax.random.key_data(run.key))
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)

    def orbax(work: Callable[[Any], Any]) -> Any:
        with ocp.StandardCheckpointer() as checkpointer:
            result = work(checkpointer)
            checkpointer.wait_until_finished()
        return result

    ways: dict[str, dict[str, Callable[[], Any]]] = {
        "save": {
            "jaxshard": lambda: js.save(root / "ours", run, layout) and None,
            "Orbax": lambda: orbax(lambda one: one.save(root / "theirs", arrays)),
        },
        "restore": {
            "jaxshard": lambda: js.restore(root / "ours", layout),
            "Orbax": lambda: orbax(lambda one: one.restore(root / "theirs", wanted)),
        },
    }
    figures: dict[str, Any] = {}
    for number in range(rounds + 1):
        for folder in ("ours", "theirs"):
            shutil.rmtree(root / folder, ignore_errors=True)
        for what, both in ways.items():
            names = list(both) if number % 2 else list(both)[::-1]
            costs = {name: cost(both[name]) for name in names}
            if number:  # the first round compiles, and imports Orbax
                figures.setdefault(what, []).append(costs)
    return {what: _summarize(costs) for what, costs in figures.items()}


def _summarize(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    made: dict[str, dict[str, float]] = {}
    for unit in rounds[0]["Orbax"]:
        made[unit] = {name: statistics.median(one[name][unit] for one in rounds) for name in rounds[0]}
        ratios = [one["jaxshard"][unit] / max(one["Orbax"][unit], 1e-3) for one in rounds]
        made[unit] |= {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("width", 1024), ("depth", 16), ("rounds", 3), ("orbax-rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--folder", metavar="DIR", help="where to save; a temporary folder by default")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    made, tx = model(options.width, options.depth), optax.adam(1e-3)
    figures: dict[str, Any] = vars(options).copy()
    strategies = {
        "fsdp": (js.fsdp("data"), js.make_mesh(data=8)),
        "pipeline": (js.compose(js.fsdp("data"), js.pipeline()), js.make_mesh(data=4, pipe=2)),
    }
    for name, (strategy, mesh) in strategies.items():
        layout = js.layout(strategy, mesh, made.init, tx)
        run = js.init(made.init, tx, layout, 0)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            root = Path(folder) / "run"
            measure(root, run, layout)  # compiles, and imports Orbax
            rounds = [measure(root, run, layout) for _ in range(options.rounds)]
            step = root / "1"
            size = sum(file.stat().st_size for file in step.rglob("*") if file.is_file())
            files = sum(file.is_file() for file in step.rglob("*"))
        medians = {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}
        figures[name] = medians | {"bytes": size, "files": files}
        print(f"{name}: {size / 1e6:.0f} MB in {files} files")
        for what, seconds in medians.items():
            print(f"  {what:26} {seconds:7.4f} s  {size / 1e6 / seconds:7.0f} MB/s")
        print(f"  the loop is blocked for {medians['background save, blocked'] / medians['save']:.1%} of a save")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures["beside Orbax"] = beside_orbax(Path(folder), options.orbax_rounds)
    print(f"1 GB beside Orbax alone, {options.orbax_rounds} rounds in turns")
    for what, units in figures["beside Orbax"].items():
        for unit, row in units.items():
            both = f"jaxshard {row['jaxshard']:6.2f}  Orbax {row['Orbax']:6.2f}"
            print(
                f"  {what:8} {unit:12} {both}  ratio {row['ratio']:5.2f} ({row['lowest']:.2f} to {row['highest']:.2f})"
            )
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
