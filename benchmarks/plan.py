"""Memory and communication of a training step, predicted before and read from the compiled program: the table in docs.

    pip install "jax[tpu]" -e .                    # libtpu; for "h100:8": docs/guides/planner.md, GPUs
    python benchmarks/plan.py [--seed N --cases N] [--json FILE] [--write docs/records/planner_table.md]
    python benchmarks/plan.py --cases 2 --seed 7 --only drawn       # two cases that nobody has seen
    python benchmarks/plan.py --update docs/records/planner_table.md    # new predictions beside what was compiled

Each step of `plan_cases.py` is compiled for chips that are not here, in a process of its own that is stopped when
buffers are assigned, before code is generated: its peak is known by then. A GPU's program is compiled to the end.
`--json` keeps what was found, and compiles no case again that is in it; `--keep` keeps the programs, whose collectives
are compared anew with the promise of today.

The table has for each case the peak that `js.plan.predict` says, the compiler's, and the difference over the
compiler's; whether the step fits, as predicted and as compiled; and the bytes of its collectives. Of a step that the
compiler refuses the peak is what it would have needed, where the dump says that.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from compiler_dump import is_assigned, memory, program_text
from plan_cases import FIXED, Case, draw, make_parts

from jaxshard.checks.collectives.dump import expand_elements

ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
MEDIAN, WORST = 0.05, 0.15
"""The bounds of the errors."""


def child(case: Case, out: Path) -> None:
    """Compile one step in this process; the parent may stop it once its buffers are assigned."""
    import jax

    import jaxshard as js

    compile_lowered = jax.stages.Lowered.compile
    found: dict[str, Any] = {}

    def compile_and_dump(lowered: Any, compiler_options: Any = None, **kwargs: Any) -> Any:
        options = dict(compiler_options or {}) | {"xla_dump_to": str(out)}
        compiled = compile_lowered(lowered, compiler_options=options, **kwargs)
        found["analysis"] = {
            "arguments": compiled.memory_analysis().argument_size_in_bytes,
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            "peak": compiled.memory_analysis().peak_memory_in_bytes,
        }
        return compiled

    try:
        parts = make_parts(case)
        lowered = js.make_step(parts.loss, parts.tx, parts.layout, engine=parts.engine).lower(parts.batch)
        jax.stages.Lowered.compile = compile_and_dump
        lowered.compile()
    except Exception as error:  # a refusal is a result
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"[:3000]
        found["refused"] = "RESOURCE_EXHAUSTED" in found["error"]  # other errors are the compiler's own
    (out / "found.json").write_text(json.dumps(found))


def compile_case(case: Case, *, limit: float = 600, keep: Path | None = None) -> dict[str, Any]:
    """Compile a case in a process of its own: bytes, the largest live buffers, collectives, or the refusal."""
    out = Path(tempfile.mkdtemp(prefix="jaxshard-plan-"))
    command = [sys.executable, __file__, "--child", json.dumps(case), "--out", str(out)]
    started = time.time()
    stopped = False
    with open(out / "log.txt", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT)
        while process.poll() is None and not stopped:
            time.sleep(1)
            if stopped := is_assigned(out):
                time.sleep(2)
            if stopped or time.time() - started > limit:
                process.kill()
                process.wait()
    result: dict[str, Any] = {"name": case.name, "case": case._asdict(), "seconds": round(time.time() - started)}
    if (out / "found.json").exists():
        result |= json.loads((out / "found.json").read_text())
    elif not stopped:
        result["error"] = f"status {process.returncode}: " + (out / "log.txt").read_text()[-1500:]
    if stopped or "analysis" in result or is_assigned(out):
        result |= memory(out, 15)
        if "analysis" in result:
            result["peak"] = result["analysis"]["peak"]
        result |= communication(case, program_text(out))
        if keep is not None:
            keep_dump(out, folder_of(case, keep))
    shutil.rmtree(out, ignore_errors=True)
    return result


def communication(case: Case, text: str) -> dict[str, Any]:
    """The collectives of a program beside what the layout promises: bytes per device by kind and axes, and why not."""
    import jaxshard as js

    parts = make_parts(case)
    promised = js.plan.promise(parts.layout, parts.engine, parts.loss, parts.batch)
    compared = js.plan.compare(promised, js.collectives(text, parts.layout.mesh))
    return {
        "collectives": compared.rows(),
        "surprises": [str(one).replace("\n", " ") for one in compared.surprises],
        "missing": list(compared.missing),
        "substitutes": list(compared.substitutes),
        "tolerated": compared.tolerated,
        "promised_bytes": compared.promised_bytes,
        "found_bytes": compared.found_bytes,
    }


def folder_of(case: Case, keep: Path) -> Path:
    """The folder of a case among kept dumps."""
    return keep / re.sub(r"[^\w=,.-]+", "_", case.name)


def kept_communication(case: Case, keep: Path) -> dict[str, Any]:
    """What `communication` says of a program that is kept; nothing where there is none."""
    file = folder_of(case, keep) / "after_optimizations.txt.gz"
    if not file.exists():
        return {}
    with gzip.open(file, "rt") as text:
        return communication(case, expand_elements(text.read()))


def keep_dump(out: Path, to: Path) -> None:
    """Keep what the compiler wrote about a step, packed."""
    to.mkdir(parents=True, exist_ok=True)
    largest = max(out.glob("*-buffer-assignment.txt"), key=lambda file: file.stat().st_size)
    stem = str(largest).removesuffix("-buffer-assignment.txt")
    for end in (".txt", "-buffer-assignment.txt", "-live-range.txt"):
        name = "after_optimizations.txt" if end == ".txt" else end[1:]
        with open(stem + end, "rb") as source, gzip.open(to / f"{name}.gz", "wb") as target:
            shutil.copyfileobj(source, target)


def predict_case(case: Case) -> dict[str, Any]:
    """What `js.plan.predict` says of a case, with the seconds that it takes."""
    import jaxshard as js

    started = time.time()
    parts = make_parts(case)
    predicted = js.plan.predict(parts.layout, parts.loss, parts.batch, parts.engine, tx=parts.tx)
    return {
        "predicted_peak": predicted.peak.total,
        "predicted_roles": dict(predicted.peak.by_role),
        "predicted_arguments": predicted.argument_bytes,
        "predicted_moment": predicted.peak.moment,
        "predicted_fits": predicted.fits,
        "predict_seconds": round(time.time() - started, 1),
    }


def error_of(row: dict[str, Any]) -> float | None:
    """The predicted peak over the compiled one, less one; None where one of them is not known."""
    return row["predicted_peak"] / row["peak"] - 1 if row.get("peak") and row.get("predicted_peak") else None


def wrongly_fits(row: dict[str, Any]) -> bool:
    """True where the prediction says that a step fits that the compiler refuses."""
    return bool(row.get("refused")) and row.get("predicted_fits") is True


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst error, and the cases that are out of bounds."""
    errors = {row["name"]: error for row in rows if not row.get("refused") and (error := error_of(row)) is not None}
    sizes = sorted(map(abs, errors.values()))
    return {
        "cases": len(rows),
        "compared": len(errors),
        "refused": [row["name"] for row in rows if row.get("refused")],
        "median": statistics.median(sizes) if sizes else None,
        "worst": sizes[-1] if sizes else None,
        "over": {name: round(error, 3) for name, error in errors.items() if abs(error) > WORST},
        "wrongly_fits": [row["name"] for row in rows if wrongly_fits(row)],
        "without_figures": {row["name"]: row.get("error", "")[:200] for row in rows if not row.get("peak")},
    }


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("jax", "libtpu", "jax-cuda12-plugin", "flax", "optax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", default="1", help="of the drawn cases")
    parser.add_argument("--cases", type=int, default=len(FIXED), help="how many are drawn")
    parser.add_argument("--only", default="", help="cases with this in their names; 'drawn' or 'fixed': that half")
    parser.add_argument("--without", help="no cases with this in their names")
    parser.add_argument("--json", help="a file of results, one a line; those in it are not compiled again")
    parser.add_argument("--no-compile", action="store_true", help="only predict, and compare with those in the file")
    parser.add_argument("--write", help="the page to write")
    parser.add_argument("--update", help="a page of the recorded cases: predict them again, compile nothing")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument("--keep", help="a folder for the compiler's dumps; collectives are read again from those in it")
    parser.add_argument("--no-predict", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--slot", type=float, default=float("inf"), help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    if args.child:
        child(Case(*json.loads(args.child)), Path(args.out))
        return
    chosen = choose(args)
    if args.list:
        print("\n".join(case.name for case in chosen))
        return
    rows = predict_recorded() if args.update else run(chosen, args)
    summary = summarize(rows)
    print(json.dumps(summary, indent=1))
    if args.write:
        from plan_table import page

        Path(args.write).write_text(page(rows, summary, versions(), len(FIXED), args.seed), encoding="utf-8")
    if args.update:
        from plan_table import updated

        written = Path(args.update)
        written.write_text(updated(written.read_text(encoding="utf-8"), rows, summary), encoding="utf-8")


def choose(args: argparse.Namespace) -> list[Case]:
    halves = {"fixed": FIXED, "drawn": draw(args.seed, args.cases)}
    chosen = halves.get(args.only, [*FIXED, *halves["drawn"]])
    if args.only not in halves:
        chosen = [case for case in chosen if args.only in case.name]
    return [case for case in chosen if not args.without or args.without not in case.name]


def run(chosen: Sequence[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compile what is not known yet, and predict every case."""
    file, started = Path(args.json) if args.json else None, time.time()
    known: dict[str, dict[str, Any]] = {}
    if file is not None and file.exists():
        known = {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}
    rows = []
    for case in chosen:
        row = known.get(case.name)
        if row is None:
            if args.no_compile:
                continue
            if time.time() - started > args.slot:
                sys.exit(3)
            row = compile_case(case, keep=Path(args.keep) if args.keep else None)
            if file is not None:
                with open(file, "a") as lines:
                    lines.write(json.dumps(row) + "\n")
        elif args.keep:
            row = row | kept_communication(case, Path(args.keep))
        if not args.no_predict:
            try:
                row = row | predict_case(case)
            except Exception as error:
                traceback.print_exc()
                row = row | {"predict_error": f"{type(error).__name__}: {error}"[:500]}
        rows.append(row)
        print(line(row), flush=True)
    return rows


def predict_recorded() -> list[dict[str, Any]]:
    """Predict the cases of `plan_peaks.json`, in their order, which is that of the page."""
    rows = []
    for entry in json.loads(Path(__file__).with_name("plan_peaks.json").read_text()):
        case = Case(**entry["case"])
        rows.append({"name": case.name} | entry | predict_case(case))
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A case in one line, in GB."""
    sizes = " ".join(
        f"{name} {row[key] / 1e9:.2f}"
        for name, key in (("compiled", "peak"), ("predicted", "predicted_peak"))
        if row.get(key)
    )
    error = error_of(row)
    off = f" {error:+.1%}" if error is not None else ""
    refused = " refused" if row.get("refused") else ""
    return f"{sizes}{off}{refused} {row.get('predict_error') or ''} {row['name']} {row.get('error', '')[:120]}"


if __name__ == "__main__":
    main()
