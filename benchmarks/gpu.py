"""Everything that is measured on one GPU, within a budget of minutes: training speed, memory, calls, attention.

    pip install -e ".[cuda12,quant]" torch torchao
    python benchmarks/gpu.py [--minutes 10] [--models 350m 1.5b 125m] [--json FILE]
    python benchmarks/gpu.py --smoke [--json FILE]    # tiny sizes, on whatever is there: that the command runs

Llama-shaped models, f32 parameters and AdamW moments, the same random tokens on both sides; JAX, torch (compiled) and
cuDNN must be installed already, nothing is fetched. The rows, the most valuable first:

- MODEL bf16, MODEL fp8 (through qwix), MODEL torch bf16, MODEL torch fp8 (by torchao): tokens per second, and the
  model FLOPs utilization (MFU) of the chip's dense bf16 peak, without recomputation, by two counts of FLOPs per token:
  6N, six for each parameter but the embedding table, which multiplies nothing; and PaLM's, with the products of
  attention, 12 L C T more (causal or not; Chowdhery et al. 2022, appendix B). Medians of rounds,
- ... memory: what `js.plan.predict` estimates, what the compiler allocates, and the peak that the device reports,
- MODEL replicas: what a check of all arrays in the background adds to a step,
- calls: CPU time of the calling thread per step, beside a plain `jax.jit` of the same program,
- attention ...: forward and backward pass of every kernel that `js.attention` knows.

Each job is a process that has the GPU to itself, so that a peak is its own. Rows are written to FILE as soon as they
are measured. A second run with the same FILE continues: it keeps the rows of the same device and versions.
A job that does not fit the rest of the minutes is skipped, one that takes far longer than expected is ended, and a row
that cannot be measured says why: "not available", "skipped" or "failed".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from one_gpu.shape import Effort, NotAvailable, Shape

MODELS = {
    "350m": Shape(1024, 24, 16, 2816, rows=8),
    "1.5b": Shape(2048, 28, 16, 5504, rows=4),
    "125m": Shape(768, 12, 12, 2048, rows=16),
}
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)
"""Flags with which `--smoke` compiles in a third of the time."""
TINY = Shape(64, 2, 4, 128, rows=2, seq=32, vocab=256)
ATTENTION = {"2k": (8, 2048, 16, 64), "8k": (2, 8192, 16, 128)}
"""Rows, positions, heads and their width."""
REASONS = ("not available", "skipped", "failed")
"""A row that has one of these keys was not measured."""

Row = dict[str, Any]
Measure = Callable[[Effort], Iterator[Row]]


class Job(NamedTuple):
    """One process: `measure` yields the figures of `rows`, in this order, in about `seconds` on an H100."""

    rows: tuple[str, ...]
    seconds: float
    measure: Measure
    needs: tuple[str, ...] = ()


class Rows:
    """The file with all rows, which is replaced whenever a row is added."""

    def __init__(self, path: Path):
        self._path = path
        self.found: dict[str, Row] = json.loads(path.read_text())["rows"] if path.exists() else {}

    def put(self, name: str, figures: Row) -> None:
        self.found[name] = figures
        written = self._path.with_suffix(".part")
        written.write_text(json.dumps({"rows": self.found}, indent=1) + "\n")
        written.replace(self._path)
        print(f"{name}: {brief(figures)}", flush=True)

    def measured(self, name: str) -> bool:
        return self.found.get(name, {}).get("machine") == machine()


def brief(figures: Row) -> str:
    """Write the numbers of a row in one line."""
    shown = {name: f"{x:.5g}" if isinstance(x, float) else x for name, x in figures.items()}
    return ", ".join(f"{name} {x}" for name, x in shown.items() if isinstance(x, str | int))


@cache
def machine() -> dict[str, str]:
    """Name the device and the versions with which a row is measured."""
    found = {"device": "cpu", "python": platform.python_version()}
    if shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found["device"] = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    for name in ("jax", "jaxlib", "qwix", "torch", "torchao"):
        if importlib.util.find_spec(name) is not None:
            found[name] = version(name)
    return found


# The jobs. What they run is imported inside: the parent holds no device, and torch may be missing.


def our_model(shape: Shape, quant: str | None, with_replicas: bool, effort: Effort) -> Iterator[Row]:
    from one_gpu.ours import measure_model

    return measure_model(shape, effort, quant, with_replicas)


def torchs_model(shape: Shape, quant: str | None, effort: Effort) -> Iterator[Row]:
    from one_gpu.by_torch import measure_torch

    return measure_torch(shape, effort, quant)


def our_calls(shape: Shape, effort: Effort) -> Iterator[Row]:
    from one_gpu.ours import measure_calls

    return measure_calls(shape, effort)


def all_attention(arrays: tuple[int, int, int, int], effort: Effort) -> Iterator[Row]:
    from one_gpu.kernels import Arrays, measure_attention

    return measure_attention(Arrays(*arrays), effort)


def jobs_of(models: dict[str, Shape], attention: dict[str, tuple[int, int, int, int]]) -> list[Job]:
    """List all jobs, the most valuable first: the first two models with everything, then what else there is."""

    def ours(name: str, quant: str | None, seconds: float) -> Job:
        row = f"{name} {quant or 'bf16'}"
        with_replicas = quant is None and name == first
        rows = (row, f"{row} memory", *([f"{name} replicas"] if with_replicas else []))
        return Job(rows, seconds, partial(our_model, models[name], quant, with_replicas), ("qwix",) if quant else ())

    def torchs(name: str, quant: str | None, seconds: float) -> Job:
        row = f"{name} torch {quant or 'bf16'}"
        needs = ("torch", *(["torchao"] if quant else []))
        return Job((row, f"{row} memory"), seconds, partial(torchs_model, models[name], quant), needs)

    first, *others = models
    jobs = []
    for name in (first, *others[:1]):
        jobs += [ours(name, None, 60), torchs(name, None, 70), ours(name, "fp8", 70)]
    jobs.append(Job(("calls",), 35, partial(our_calls, TINY)))
    for name, arrays in attention.items():
        rows = tuple(f"attention {name}, {kernel}" for kernel in ("cudnn", "splash", "blocks", "all logits"))
        jobs.append(Job(rows, 35, partial(all_attention, arrays)))
    jobs += [torchs(name, "fp8", 80) for name in (first, *others[:1])]
    for name in others[1:]:
        jobs += [ours(name, None, 45), torchs(name, None, 60)]
    return jobs


def run_here(job: Job, rows: Rows, effort: Effort) -> None:
    """Measure the rows of a job in this process, and say of those that are left why they are."""
    left = list(job.rows)
    try:
        for figures in job.measure(effort):
            rows.put(left.pop(0), figures if REASONS[0] in figures else figures | {"machine": machine()})
    except NotAvailable as error:
        for name in left:
            rows.put(name, {"not available": str(error)})
    except Exception as error:  # such as memory that is too small: the next job may still run
        for name in left:
            rows.put(name, {"failed": f"{type(error).__name__}: {error}"[:500]})
        raise


def start(job: Job, path: Path, seconds_left: float) -> Rows:
    """Run a job in a process of its own, and return all rows."""
    limit = min(seconds_left, 2 * job.seconds)
    words = [sys.executable, *sys.argv, "--job", job.rows[0], "--into", str(path)]
    try:
        status = subprocess.run(words, timeout=limit, check=False).returncode
        reason = f"the process ended with status {status}"
    except subprocess.TimeoutExpired:
        reason = f"ended after {limit:.0f} s; about {job.seconds:.0f} s were expected"
    rows = Rows(path)
    for name in job.rows:
        if not rows.measured(name) and not any(reason in rows.found.get(name, {}) for reason in REASONS):
            rows.put(name, {"failed": reason})
    return rows


def run_all(jobs: Sequence[Job], path: Path, minutes: float) -> dict[str, Row]:
    """Run the jobs that are not measured yet and fit the time, in their order; return all rows of the file."""
    deadline = time.monotonic() + 60 * minutes
    rows = Rows(path)
    for job in jobs:
        waiting = [name for name in job.rows if not rows.measured(name)]
        missing = [name for name in job.needs if importlib.util.find_spec(name) is None]
        left = deadline - time.monotonic()
        if not waiting:
            print(f"{', '.join(job.rows)}: measured already", flush=True)
        elif missing:
            for name in waiting:
                rows.put(name, {"not available": f"{' and '.join(missing)} not installed"})
        elif left < job.seconds:
            for name in waiting:
                rows.put(name, {"skipped": f"takes about {job.seconds:.0f} s, {max(left, 0):.0f} s were left"})
        else:
            for name in waiting:
                rows.found.pop(name, None)
            rows = start(job, path, left)
    return rows.found


# What is printed at the end.


def table(titles: str, lines: Sequence[Sequence[str]]) -> str:
    columns = titles.count("|") - 1
    ruler = "|---|" + "---:|" * (columns - 1)
    return "\n".join([titles, ruler, *(f"| {' | '.join(cells)} |" for cells in lines)])


def speeds(rows: dict[str, Row]) -> str:
    lines = []
    for name, row in rows.items():
        if "tokens_per_second" in row:
            torchs = rows.get(f"{name.split()[0]} torch bf16", {}).get("tokens_per_second")
            share = f"{row['tokens_per_second'] / torchs:.2f}" if torchs and "torch" not in name else ""
            used = [f"{row[f'mfu {count}']:.1%}" if f"mfu {count}" in row else "" for count in ("6N", "PaLM")]
            speed = f"{row['tokens_per_second']:,.0f}"
            lines.append([name, f"{row['seconds_per_step']:.4f}", speed, share, *used, f"{row['loss']:.3f}"])
    return table("| | s/step | tokens/s | of torch's in bf16 | MFU (6N) | MFU (PaLM) | loss |", lines)


def memories(rows: dict[str, Row]) -> str:
    kinds = ("estimated_bytes", "compiled_bytes", "peak_bytes")
    lines = [
        [name.removesuffix(" memory"), *(f"{row[kind] / 1e9:.2f}" if row.get(kind) else "" for kind in kinds)]
        for name, row in rows.items()
        if "peak_bytes" in row
    ]
    return table("| GB | estimated | by the compiler | seen |", lines)


def others(rows: dict[str, Row]) -> str:
    in_tables = {"tokens_per_second", "peak_bytes"}
    return "\n".join(f"{name}: {brief(row)}" for name, row in rows.items() if not in_tables & set(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="no job starts that does not fit these")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path, help="write all rows there, and continue what is there")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        jobs, effort = jobs_of({"tiny": TINY}, {"tiny": (1, 256, 2, 16)}), Effort(2, 2)
        os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"
    else:
        jobs = jobs_of({name: MODELS[name] for name in options.models}, ATTENTION)
        effort = Effort(options.rounds, options.steps)
    if options.job:
        run_here(next(job for job in jobs if job.rows[0] == options.job), Rows(options.into), effort)
        return
    print(", ".join(f"{name} {number}" for name, number in machine().items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = run_all(jobs, options.json or Path(folder, "rows.json"), options.minutes)
    print(f"\n{speeds(rows)}\n\n{memories(rows)}\n\n{others(rows)}", flush=True)


if __name__ == "__main__":
    main()
