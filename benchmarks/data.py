"""How many tokens the data loader delivers per CPU-second, beside what training consumes.

    python benchmarks/data.py [--batch 64] [--seq 32] [--training 13000] [--rounds 5] [--json FILE]

A file of generated uint16 tokens is memory-mapped and read as shuffled windows. CPU-seconds are those of all threads of
the process, so that other programs on the machine matter little; each figure is the median of the rounds, which take
turns. The page cache is warm: a disk adds waiting, not CPU time. `--training` is what a training run consumes in tokens
per CPU-second; the default is that of `jaxshard train`, 655,360 tokens in 50 CPU-seconds. With Grain installed
(`pip install grain`) its shuffle over the same file is shown too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import jaxshard as js
from jaxshard import data

VOCAB = 50257
TARGET = 5.0


def make_layout() -> js.Layout:
    """Rows over all devices, whatever the model."""

    def init_fn(key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (8, 8))}

    return js.layout(js.ddp("data"), js.make_mesh(data=-1), init_fn, optax.sgd(1.0))


def write_tokens(path: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for first in range(0, count, 2**22):
            rng.integers(0, VOCAB, min(2**22, count - first), np.uint16).tofile(file)


def rows_of(source: data.Source) -> Iterator[Any]:
    """Host batches without a device, as one process reads them."""
    rows = np.arange(source.batch)
    return (source.rows(step, rows) for step in itertools.count())


def grain_batches(tokens: np.ndarray, batch: int, seq: int) -> Iterator[Any]:
    """The same windows in Grain's shuffled order, in this process and without its threads."""
    import grain

    dataset = grain.MapDataset.range((len(tokens) - 1) // seq).seed(0).shuffle().repeat()
    dataset = dataset.map(lambda i: tokens[i * seq : i * seq + seq + 1].astype(np.int32)).batch(batch)
    return (dataset[step] for step in itertools.count())


def cpu_seconds(batches: Iterator[Any], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        jax.block_until_ready(next(batches))
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="global rows of a step")
    parser.add_argument("--seq", type=int, default=32, help="tokens in a row")
    parser.add_argument("--tokens", type=int, default=2**25, help="tokens in the file")
    parser.add_argument("--training", type=float, default=13_000, help="tokens per CPU-second that training consumes")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices, where there are no others")
    parser.add_argument("--batches", type=int, default=100, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    js.simulate_devices(args.devices)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        write_tokens(path, args.tokens)
        tokens = np.memmap(path, np.uint16, "r")
        layout = make_layout()

        def windows(seed: int = 0) -> data.Windows:
            return data.windows(tokens, batch=args.batch, seq=args.seq, seed=seed, vocab=VOCAB)

        mixed = data.mixture({"a": (windows(1), 0.7), "b": (windows(2), 0.2), "c": (windows(3), 0.1)}, seed=0)
        makers: dict[str, Callable[[], Iterator[Any]]] = {
            "windows, rows on the host": lambda: rows_of(windows()),
            "windows, js.batches": lambda: js.batches(windows(), layout),
            "windows, js.batches, prefetch=0": lambda: js.batches(windows(), layout, prefetch=0),
            "mixture of three, js.batches": lambda: js.batches(mixed, layout),
        }
        if find_spec("grain"):
            makers["grain shuffle, rows on the host"] = lambda: grain_batches(tokens, args.batch, args.seq)

        streams = {name: make() for name, make in makers.items()}
        for stream in streams.values():
            cpu_seconds(stream, args.batches // 5 + 1)
        spent: dict[str, list[float]] = {name: [] for name in streams}
        for _ in range(args.rounds):
            for name, stream in streams.items():
                spent[name].append(cpu_seconds(stream, args.batches))

    per_round = args.batches * args.batch * args.seq
    rates = {name: per_round / max(statistics.median(seconds), 1e-9) for name, seconds in spent.items()}
    devices = f"{jax.device_count()} {jax.devices()[0].platform} devices"
    print(f"{devices}, {os.cpu_count()} cores, batches of {args.batch} x {args.seq}")
    print(f"{'':34}{'CPU-ms/batch':>14}{'tokens/CPU-s':>16}{'x training':>12}")
    for name, rate in rates.items():
        each = 1000 * args.batch * args.seq / rate
        print(f"{name:34}{each:14.3f}{rate:16,.0f}{rate / args.training:12.1f}")
    factor = rates["windows, js.batches"] / args.training
    print(f"js.batches delivers {factor:.1f} times what training consumes; the target is {TARGET:.0f}")
    if args.json:
        args.json.write_text(json.dumps({"tokens_per_cpu_second": rates, "training": args.training, "factor": factor}))
    for stream in streams.values():
        if isinstance(stream, data.Batches):
            stream.close()


if __name__ == "__main__":
    main()
