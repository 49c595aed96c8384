"""The same GPT trained by this package and by its peers, side by side on two devices of this machine's CPU.

    python benchmarks/peers.py [--torch PYTHON] [--easydel PYTHON] [--maxtext PYTHON] [--levanter PYTHON] [--write]

Each PYTHON is an interpreter that has that library; a peer without one is left out, with the reason:

    --torch      pip install torch numpy                      (the extra `bench`; by default this interpreter)
    --easydel    pip install easydel==0.3.0 torch pillow      (Python 3.11)
    --maxtext    pip install "maxtext[tpu]==0.2.5"            (Python 3.12)
    --levanter   pip install levanter==1.1 jax==0.4.20 jaxlib==0.4.20 "numpy<2" "scipy<1.13" "ml-dtypes<0.5" \\
                     "pyarrow<20"                         (Python 3.12; later versions of JAX lack what it imports)

Every peer is a program in `benchmarks/peers/`, as its user would write it: equal shapes, f32, AdamW, one global batch.
Each runs in processes of its own; they take turns of a few steps, the others asleep, so that a busy machine is busy for
all, and ratios are taken within a round. One core and one compute thread per device. Printed, and with `--write`
written into docs/records/peers.md:

- CPU-seconds per step over all processes, and their ratio to the same library on one device;
- memory: the most that all processes held, less what they held when their libraries were imported;
- compile: CPU-seconds of the first step beyond those of a usual one;
- first step: CPU-seconds from the start of Python to the end of the first step, imports and initialisation included;
- lines: of the program without the model, and how many of them the one-device program lacks.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import io
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from interleaved import free_cores

PROGRAMS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PROGRAMS))
from shape import Shape  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "records" / "peers.md"
MARK = "<!-- the tables below are written by benchmarks/peers.py --write -->"
WARM_UP_STEPS = 2
DEVICES = 2
TRAINERS = ("easydel", "maxtext", "levanter")
"""Libraries with models and loops of their own."""


class Peer(NamedTuple):
    """One contender.

    Attributes:
      name: in the table.
      program: its file in `peers/`.
      library: whose interpreter runs it: "own", or the name of a flag.
      reference: the contender on one device that it is compared with; None for such a one.
      processes: over which the devices are spread.
      options: more arguments of the program's `build`.
    """

    name: str
    program: str
    library: str
    reference: str | None = None
    processes: int = 1
    options: Mapping[str, str] = MappingProxyType({})

    @property
    def devices(self) -> int:
        return 1 if self.reference is None else DEVICES


JAX, TORCH = "jax, one device", "torch, one process"
PEERS = (
    Peer(JAX, "jax_one", "own"),
    Peer("jax.jit, shardings by hand (FSDP)", "jax_by_hand", "own", JAX),
    Peer("jaxshard ddp", "jaxshard_any", "own", JAX, options={"how": "ddp"}),
    Peer("jaxshard zero2", "jaxshard_any", "own", JAX, options={"how": "zero2"}),
    Peer("jaxshard fsdp", "jaxshard_any", "own", JAX, options={"how": "fsdp"}),
    Peer("jaxshard fsdp, auto", "jaxshard_any", "own", JAX, options={"how": "fsdp", "engine": "auto"}),
    Peer("jaxshard tensor", "jaxshard_any", "own", JAX, options={"how": "tensor", "engine": "auto"}),
    Peer(TORCH, "torch_one", "torch"),
    Peer("torch DDP, gloo", "torch_ddp", "torch", TORCH, 2),
    Peer("torch FSDP2, gloo", "torch_fsdp2", "torch", TORCH, 2),
    Peer("EasyDeL, fsdp", "easydel_fsdp", "easydel", JAX),
    Peer("MaxText, fsdp", "maxtext_fsdp", "maxtext", JAX),
    Peer("Levanter, fsdp", "levanter_fsdp", "levanter", JAX),
)
VERSIONS = {"own": ("jax", "flax", "optax"), "torch": ("torch",)} | {name: (name, "jax") for name in TRAINERS}


class Absent(Exception):
    """A peer can't run here; the message says why."""


class Running:
    """The processes of a contender that took their first step."""

    def __init__(self, peer: Peer, python: str, shape: Shape, cores: list[int], meeting: str, log: Path) -> None:
        share = peer.devices // peer.processes
        self.peer, self._log = peer, log
        self.processes = []
        for rank in range(peer.processes):
            task = {
                "program": peer.program,
                "shape": shape._asdict(),
                "rank": rank,
                "meeting": meeting,
                "options": dict(peer.options),
                "cores": cores[rank * share : (rank + 1) * share],
            }
            with log.open("a") as errors:
                process = subprocess.Popen(
                    [python, str(PROGRAMS / "worker.py"), json.dumps(task)],
                    env=os.environ | environment(peer.library),
                    cwd=log.parent,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self.processes.append(process)
        try:
            self.first = self._answers()
        except Absent:
            self.stop()
            raise

    def run(self, steps: int) -> dict[str, float]:
        """Take a turn; return its figures, over all processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = self._answers()
        return {
            "cpu": sum(answer["cpu"] for answer in answers) / steps,
            "wall": max(answer["wall"] for answer in answers) / steps,
            "loss": statistics.fmean(answer["loss"] for answer in answers),
            "peak_bytes": sum(answer["peak_bytes"] for answer in answers),
        }

    def stop(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:  # it waits for a rank that is gone
                process.kill()

    def _answers(self) -> list[dict[str, float]]:
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise Absent(f"its process ended: {said[-1][:200] if said else 'without a word'}")
        return [json.loads(line) for line in lines]


def environment(library: str) -> dict[str, str]:
    """One compute thread per device, on the CPU; this package for its own programs alone."""
    devices = f"--xla_force_host_platform_device_count={DEVICES}"
    own = {"PYTHONPATH": str(PROGRAMS.parent.parent)} if library == "own" else {"PYTHONPATH": ""}
    return own | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false" + (f" {devices}" if library in TRAINERS else ""),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": next(name for _, name in socket.if_nameindex() if name.startswith("lo")),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }


def versions_of(python: str, library: str) -> dict[str, str]:
    """The versions of what a library's interpreter has; Absent if that is not the library."""
    code = (
        "import json, platform, sys\nfrom importlib.metadata import version\n"
        "print(json.dumps({'python': platform.python_version()} | {name: version(name) for name in sys.argv[1:]}))"
    )
    found = subprocess.run([python, "-c", code, *VERSIONS[library]], capture_output=True, text=True, check=False)
    if found.returncode:
        raise Absent(f"{python} lacks {library}: {found.stderr.strip().splitlines()[-1]}")
    versions: dict[str, str] = json.loads(found.stdout)
    return versions


def measure(
    interpreters: dict[str, str], shape: Shape, rounds: int, steps: int, only: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Run all contenders in turns; return the rows of those that ran, and why others did not, by name."""
    cores, running, skipped = free_cores(DEVICES), [], {}
    turns: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, peer in enumerate(PEERS):
                if only and not any(word in peer.name for word in only):
                    continue
                try:
                    if peer.library not in interpreters:
                        raise Absent(f"no --{peer.library} PYTHON was given")
                    home = Path(folder, str(number))
                    home.mkdir()
                    one = Running(peer, interpreters[peer.library], shape, cores, str(home / "meeting"), home / "log")
                    running.append(one)
                    one.run(WARM_UP_STEPS)
                    turns[peer.name] = []
                    print(f"{peer.name}: loss {one.first[0]['first_loss']:.4f} in the first step", flush=True)
                except Absent as reason:
                    skipped[peer.name] = str(reason)
                    print(f"{peer.name}: left out: {reason}", flush=True)
            for number in range(rounds):
                for one in running:
                    turns[one.peer.name].append(one.run(steps))
                took = ", ".join(f"{of_one[-1]['cpu']:.3f}" for of_one in turns.values())
                print(f"round {number + 1} of {rounds}: CPU-seconds per step {took}", flush=True)
        finally:
            for one in running:
                one.stop()
    return {one.peer.name: summarize(one, turns) for one in running}, skipped


def summarize(one: Running, turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The figures of a contender from its turns."""
    peer, mine = one.peer, turns[one.peer.name]
    cpu = statistics.median(turn["cpu"] for turn in mine)
    row: dict[str, Any] = {
        "devices": peer.devices,
        "parameters": int(one.first[0]["parameters"]),
        "losses": [turn["loss"] for turn in mine],
        "cpu_seconds_per_step": cpu,
        "seconds_per_step": statistics.median(turn["wall"] for turn in mine),
        "memory_bytes": mine[-1]["peak_bytes"] - sum(first["imported_bytes"] for first in one.first),
        "imported_bytes": sum(first["imported_bytes"] for first in one.first),
        "compile_cpu_seconds": max(0.0, sum(first["first_step_cpu"] for first in one.first) - cpu),
        "first_step_cpu_seconds": sum(first["cpu"] for first in one.first),
        "first_step_seconds": max(first["wall"] for first in one.first),
        **count_lines(peer),
    }
    if peer.reference in turns and peer.reference is not None:
        ratios = [turn["cpu"] / base["cpu"] for turn, base in zip(mine, turns[peer.reference], strict=True)]
        row |= {"reference": peer.reference, "ratio": statistics.median(ratios), "ratios": ratios}
    return row


def count_lines(peer: Peer) -> dict[str, int]:
    """Lines of a program, and how many of them are not in the program for one device of the same library."""
    base = {"own": "jax_one", "torch": "torch_one"}.get(peer.library)
    lines = code_lines((PROGRAMS / f"{peer.program}.py").read_text())
    if base is None:
        return {"lines": len(lines)}
    known = code_lines((PROGRAMS / f"{base}.py").read_text())
    added = [line for line in difflib.ndiff(known, lines) if line.startswith("+ ")]
    return {"lines": len(lines), "new_lines": len(added)}


def code_lines(source: str) -> list[str]:
    """The lines of a program that hold code: no blank ones, no comments, no docstrings."""
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    texts: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            texts |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            used |= set(range(token.start[0], token.end[0] + 1))
    return [line.strip() for number, line in enumerate(source.splitlines(), 1) if number in used - texts]


def check_losses(rows: dict[str, dict[str, Any]]) -> None:
    """Fail unless contenders that begin with the same parameters have the same losses, rounding apart."""
    for peer in PEERS:
        if peer.name not in rows or peer.reference not in rows or peer.library in TRAINERS:
            continue
        for mine, expected in zip(rows[peer.name]["losses"], rows[peer.reference]["losses"], strict=True):
            if not math.isclose(mine, expected, rel_tol=1e-3):
                raise SystemExit(f"{peer.name}: loss {mine}, but {peer.reference} has {expected}: not the same model")


def table(rows: dict[str, dict[str, Any]], skipped: dict[str, str]) -> str:
    """The figures as a Markdown table, and below it what was left out."""
    lines = [
        "| | CPU-s per step | over one device | memory, MiB | compile, CPU-s | to first step, CPU-s | lines | new |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        new = str(row["new_lines"]) if row["devices"] > 1 and "new_lines" in row else ""
        lines.append(
            f"| {name} | {row['cpu_seconds_per_step']:.3f} | {ratio} | {row['memory_bytes'] / 2**20:,.0f} | "
            f"{row['compile_cpu_seconds']:.1f} | {row['first_step_cpu_seconds']:.1f} | {row['lines']} | {new} |"
        )
    lines += ["", *(f"Left out: {name}: {reason}." for name, reason in skipped.items())]
    return "\n".join(lines).rstrip() + "\n"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option: Callable[..., Any] = partial(parser.add_argument, type=int, metavar="N")
    option("--rounds", default=5, help="turns of every contender")
    option("--steps", default=3, help="steps per turn")
    option("--width", default=256)
    option("--blocks", default=4)
    option("--heads", default=4)
    option("--seq", default=128)
    option("--batch", default=8, help="rows of the global batch")
    for library in ("torch", *TRAINERS):
        parser.add_argument(f"--{library}", metavar="PYTHON", help=f"an interpreter that has {library}")
    parser.add_argument(
        "--only", action="append", default=[], metavar="WORD", help="contenders with this in their name"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 1 or args.batch % DEVICES:
        parser.error("at least 1 round and 1 step are needed, and a batch that two devices can share")
    return args


def main() -> None:
    args = parse_args()
    shape = Shape(args.width, args.blocks, args.heads, args.seq, args.batch)
    torch = args.torch or (sys.executable if importlib.util.find_spec("torch") else None)
    chosen = {"own": sys.executable, "torch": torch} | {name: getattr(args, name) for name in TRAINERS}
    interpreters, versions = {}, {}
    for library, python in chosen.items():
        if python is not None:
            try:
                versions[library] = versions_of(python, library)
                interpreters[library] = python
            except Absent as reason:
                raise SystemExit(f"--{library}: {reason}") from None
    rows, skipped = measure(interpreters, shape, args.rounds, args.steps, args.only)
    check_losses(rows)
    facts = [
        f"{library}: {', '.join(f'{name} {v}' for name, v in found.items())}" for library, found in versions.items()
    ]
    head = f"{args.rounds} rounds of {args.steps} steps; {shape}; two cores. " + "; ".join(facts)
    print(f"\n{head}\n\n{table(rows, skipped)}")
    if args.json:
        found = {"versions": versions, "shape": shape._asdict(), "rounds": args.rounds, "steps": args.steps}
        Path(args.json).write_text(json.dumps(found | {"peers": rows, "left_out": skipped}, indent=2) + "\n")
    if args.write:
        text = PAGE.read_text()
        PAGE.write_text(f"{text.partition(MARK)[0]}{MARK}\n\n{head}\n\n{table(rows, skipped)}")


if __name__ == "__main__":
    main()
