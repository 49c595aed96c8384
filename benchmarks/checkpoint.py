"""How long a save blocks the training loop, in the background and not, and what the checksums cost.

    python benchmarks/checkpoint.py [--width 1024] [--depth 16] [--rounds 3] [--folder DIR] [--json FILE]

Eight simulated CPU devices hold stacked matrices and Adam's state under FSDP and in a pipeline; each figure is the
median of the rounds. The folder should lie on the disk that counts; a warm page cache makes reads look fast.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("width", 1024), ("depth", 16), ("rounds", 3)):
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
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
