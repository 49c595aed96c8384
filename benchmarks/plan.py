"""Predicted peaks beside those of the compiler."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from compiler_dump import is_assigned, memory, program_text
from plan_cases import Case, cases, draw, make_parts, mesh_of

ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}


def child(case: Case, out: Path) -> None:
    """Compile one step in this process; the parent may stop it once its buffers are assigned."""
    import jax

    import jaxshard as js

    compile_lowered = jax.stages.Lowered.compile
    found: dict[str, Any] = {}

    def measured(lowered: Any, compiler_options: Any = None, **kwargs: Any) -> Any:
        found["refused"] = True  # unless it returns
        options = dict(compiler_options or {}) | {"xla_dump_to": str(out)}
        compiled = compile_lowered(lowered, compiler_options=options, **kwargs)
        memory = compiled.memory_analysis()
        found["analysis"] = {
            "arguments": memory.argument_size_in_bytes,
            "output": memory.output_size_in_bytes,
            "alias": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "peak": memory.peak_memory_in_bytes,
        }
        return compiled

    started = time.time()
    try:
        parts = make_parts(case)
        step = js.make_step(parts.loss, parts.tx, parts.layout, engine=parts.engine)
        lowered = step.lower(parts.batch)
        found["trace_seconds"] = round(time.time() - started, 1)
        jax.stages.Lowered.compile = measured
        lowered.compile()
        found["refused"] = False
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"[:3000]
    (out / "found.json").write_text(json.dumps(found))


def compile_case(case: Case, *, codegen: bool = False, limit: float = 400, keep: Path | None = None) -> dict[str, Any]:
    """Compile a case in a process of its own; returns bytes, largest live buffers and collectives, or the refusal."""
    out = Path(tempfile.mkdtemp(prefix="jaxshard-plan-"))
    command = [sys.executable, __file__, "--child", json.dumps(case), "--out", str(out)]
    started = time.time()
    with open(out / "log.txt", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT)
        stopped = False
        while process.poll() is None and not stopped:
            time.sleep(1)
            if not codegen and is_assigned(out):
                time.sleep(2)
                process.kill()
                process.wait()
                stopped = True
            elif time.time() - started > limit:
                process.kill()
                process.wait()
    result: dict[str, Any] = {"name": case.name, "case": case._asdict(), "seconds": round(time.time() - started)}
    child_found = out / "found.json"
    found = json.loads(child_found.read_text()) if child_found.exists() else {}
    if not stopped and not found:
        result |= {"error": f"status {process.returncode}: " + (out / "log.txt").read_text()[-1500:]}
    result |= found
    if stopped or "analysis" in found or is_assigned(out):
        result |= memory(out, 15)
        if "analysis" in found:
            result["peak"] = found["analysis"]["peak"]
        result["collectives"] = collectives_of(program_text(out), case)
        if keep is not None:
            keep_dump(out, keep / re.sub(r"[^\w=,.-]+", "_", case.name))
    shutil.rmtree(out, ignore_errors=True)
    return result


def collectives_of(text: str, case: Case) -> list[dict[str, Any]]:
    """The collectives of a program by kind and axes: bytes per device and step, and how many."""
    import jaxshard as js

    sums: dict[tuple[str, str, str], list[int]] = {}
    for one in js.plan.arrays_only(js.collectives(text, mesh_of(case))):
        axes = one.axes if isinstance(one.axes, str) else "+".join(one.axes or ("?",))
        entry = sums.setdefault((one.kind, axes, one.dtype), [0, 0])
        entry[0] += one.count or 0
        entry[1] += one.bytes or 0
    return [
        {"kind": kind, "axes": axes, "dtype": dtype, "count": count, "bytes": total}
        for (kind, axes, dtype), (count, total) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]


def keep_dump(out: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    files = list(out.glob("*-buffer-assignment.txt"))
    stem = str(max(files, key=lambda file: file.stat().st_size)).removesuffix("-buffer-assignment.txt")
    for end in (".txt", "-buffer-assignment.txt", "-live-range.txt"):
        name = "after_optimizations" + end if end == ".txt" else end[1:]
        with open(stem + end, "rb") as source, gzip.open(to / (name + ".gz"), "wb") as target:
            shutil.copyfileobj(source, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default=None)
    parser.add_argument("--cases", type=int, default=36)
    parser.add_argument("--lines")
    parser.add_argument("--keep")
    parser.add_argument("--only")
    parser.add_argument("--without", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--codegen", action="store_true")
    parser.add_argument("--slot", type=float, default=1e9, help="stop after so many seconds")
    parser.add_argument("--child")
    parser.add_argument("--out")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    if args.child:
        child(Case(*json.loads(args.child)), Path(args.out))
        return
    chosen = [case for case in cases(args.seed, args.cases) if not args.only or args.only in case.name]
    chosen = [case for case in chosen if not args.without or args.without not in case.name]
    if args.list:
        print("\n".join(case.name for case in chosen))
        return
    done = set()
    if args.lines and Path(args.lines).exists():
        done = {json.loads(line)["name"] for line in Path(args.lines).read_text().splitlines()}
    started = time.time()
    for case in chosen:
        if case.name in done:
            continue
        if time.time() - started > args.slot:
            sys.exit(3)
        result = compile_case(case, codegen=args.codegen, keep=Path(args.keep) if args.keep else None)
        shown = {name: result.get(name) for name in ("seconds", "arguments", "temporaries", "peak", "refused", "error")}
        print(case.name, shown, flush=True)
        if args.lines:
            with open(args.lines, "a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
