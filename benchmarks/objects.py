"""Compare the bandwidth of a checkpoint in an object store with that of the same checkpoint on disk.

    python benchmarks/objects.py [--gigabytes 1.0] [--rounds 3] [--folder DIR] [--json FILE]

Eight simulated CPU devices hold f32 matrices and Adam's moments under FSDP. `js.save` and `js.restore` write and read
them in a folder and at an s3:// address, in turns; each figure is the median of the rounds. The server is moto's, in a
process of its own on this machine, so it needs the same cores, and its memory is the disk. It shows what the code costs
and how many bytes and requests it sends, and not the bandwidth of a real store.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxshard as js


def start_server() -> tuple[subprocess.Popen[bytes], Path]:
    """Start moto's S3 server with a bucket, and point this process at it; return its process and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(tempfile.mkdtemp()) / "requests"
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    server = subprocess.Popen([sys.executable, "-c", code], stdout=log.open("wb"), stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    for _ in range(100):
        time.sleep(0.2)
        try:
            urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"))
            break
        except OSError:
            continue
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    return server, log


def make_run(gigabytes: float) -> tuple[js.TrainState, js.Layout]:
    width = 1024
    count = max(1, round(gigabytes * 1e9 / (12 * width * width)))

    def init(key: jax.Array) -> Any:
        return {f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (width, width)) for i in range(count)}

    tx = optax.adam(1e-3)
    layout = js.layout(js.fsdp(), js.make_mesh(data=-1), init, tx)
    return js.init(init, tx, layout, 0), layout


def timed(fn: Callable[[], Any]) -> tuple[float, float, Any]:
    """Call a function; return (seconds, CPU seconds of this process, the function's result)."""
    begun, used = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(fn())
    return time.perf_counter() - begun, time.process_time() - used, result


def measure(root: str, run: js.TrainState, layout: js.Layout) -> dict[str, tuple[float, float]]:
    """Save and restore a run, and return {"save": (seconds, CPU seconds), "restore": ...}."""
    *saved, _ = timed(lambda: str(js.save(root, run, layout)))
    *restored, back = timed(lambda: js.restore(root, layout))
    pairs = zip(jax.tree.leaves((back.params, back.opt_state)), jax.tree.leaves((run.params, run.opt_state)))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)
    return {"save": tuple(saved), "restore": tuple(restored)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    js.simulate_devices(8)
    server, log = start_server()
    folder = Path(tempfile.mkdtemp(dir=flags.folder))
    try:
        run, layout = make_run(flags.gigabytes)
        size = sum(x.nbytes for x in jax.tree.leaves((run.params, run.opt_state)))
        found: dict[str, list[tuple[float, float]]] = {}
        for number in range(flags.rounds):
            numbered = run._replace(step=jax.device_put(np.int32(number), run.step.sharding))
            for where, root in (("disk", str(folder / "run")), ("objects", "s3://bucket/run"))[:: (-1) ** number]:
                for kind, seconds in measure(root, numbered, layout).items():
                    found.setdefault(f"{kind}, {where}", []).append(seconds)
        requests = [line for line in log.read_text().splitlines() if "HTTP/1.1" in line]
        report(found, size, len(requests), flags)
    finally:
        server.terminate()
        shutil.rmtree(folder, ignore_errors=True)


def report(found: dict[str, list[tuple[float, float]]], size: int, requests: int, flags: argparse.Namespace) -> None:
    print(f"{size / 1e9:.2f} GB, {flags.rounds} rounds, {requests} requests")
    print(f"{'':18}  seconds   MB/s  CPU seconds")
    result: dict[str, Any] = {"bytes": size, "requests": requests}
    for name, rounds in sorted(found.items()):
        seconds, used = (statistics.median(values) for values in zip(*rounds))
        print(f"{name:18}  {seconds:7.2f} {size / 1e6 / seconds:6.0f}  {used:11.2f}")
        result[name] = {"seconds": seconds, "cpu_seconds": used}
    for kind in ("save", "restore"):
        pairs = zip(found[f"{kind}, objects"], found[f"{kind}, disk"])
        ratio = statistics.median(objects[0] / disk[0] for objects, disk in pairs)
        print(f"{kind}: {ratio:.2f} times the seconds of the disk")
        result[f"{kind} ratio"] = ratio
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
