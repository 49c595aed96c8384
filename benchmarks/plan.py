"""The error of the estimate of memory: steps that a seed draws, compiled for chips that are not here.

    pip install "jax[tpu]" -e .                     # libtpu; for "h100:8" docs/guides/planner.md names two wheels
    python benchmarks/plan.py --list                # the 150 steps that the seed draws
    python benchmarks/plan.py                       # compile and estimate those that are not recorded yet
    python benchmarks/plan.py --known               # estimate the steps of plan_peaks.json; nothing is compiled
    python benchmarks/plan.py --write docs/records/planner_table.md

The seed is the hash of a commit that changed a rule of `jaxshard/plan/memory`, so that nobody can choose it. The record
`plan_draw.json` has the results with their seed, and the record's own seed is used as long as the record is there: a
commit that changes only words draws no new steps. After a change of a rule delete the record, and the last commit of
that folder draws other steps. The compiler is asked as by `js.plan.compile_for`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plan_cases import Case, draw, make_parts

from jaxshard.plan.memory_report import BAND

HERE = Path(__file__).parent
KNOWN, DRAWN = HERE / "plan_peaks.json", HERE / "plan_draw.json"
ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
Row = dict[str, Any]


def frozen_at() -> str:
    """Return the hash of the commit that last changed the estimate."""
    command = ["git", "log", "-1", "--format=%H", "--", "jaxshard/plan/memory"]
    return subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True).stdout.strip()


# The compiler's figures.


def compile_case(case: Case) -> Row:
    """Ask the compiler about a case: live and allocated bytes, and whether it refuses the step."""
    import jax

    import jaxshard as js

    parts, started = make_parts(case), time.time()
    step = js.make_step(parts.loss, parts.tx, parts.layout, engine=parts.engine)
    row: Row = {"case": case._asdict(), "refused": False}
    try:
        verdict = js.plan.compile_for(step, parts.batch, case.topology)
        row |= {"peak": verdict.live_bytes, "allocated": verdict.allocated_bytes, "refused": bool(verdict.refusal)}
        row["fits"] = verdict.fits
    except (jax.errors.JaxRuntimeError, RuntimeError, TimeoutError) as error:  # the compiler's own
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row | {"seconds": round(time.time() - started)}


# The estimate's figures.


def estimate(case: Case) -> Row:
    """Estimate a case from its traced program, with the CPU seconds that it takes."""
    import jaxshard as js

    started = time.process_time()
    parts = make_parts(case)
    found = js.plan.predict(parts.layout, parts.loss, parts.batch, parts.engine, tx=parts.tx, estimate=True)
    seconds = round(time.process_time() - started, 1)
    return {"estimate": found.live_bytes, "estimate_fits": found.fits, "estimate_seconds": seconds}


def error_of(row: Row) -> float | None:
    """Return the estimated peak over the compiled one, less one; None where one of them is not known."""
    return row["estimate"] / row["peak"] - 1 if row.get("peak") and row.get("estimate") else None


def wrongly_fits(row: Row) -> bool:
    """Return True where the estimate says that a step fits that does not."""
    return row.get("fits") is False and row.get("estimate_fits") is True


def quantile(values: Iterable[float], share: float) -> float:
    """Return a quantile of some values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarize(rows: Sequence[Row]) -> Row:
    """Return the figures of a table: errors, the share within the band, refusals, and cases without a figure."""
    errors = [error for row in rows if (error := error_of(row)) is not None]
    sizes = list(map(abs, errors))
    # Allocated bytes must fit; here they are shares of the estimate.
    needs = [row.get("allocated", row["peak"]) / row["estimate"] - 1 for row in rows if error_of(row) is not None]
    figures = {
        "median": statistics.median(sizes),
        "p90": quantile(sizes, 0.9),
        "worst": [min(errors), max(errors)],
        "within_20_percent": sum(size <= 0.2 for size in sizes) / len(sizes),
        "within_band": sum(BAND[0] <= need <= BAND[1] for need in needs) / len(needs),
    }
    return {
        "cases": len(rows),
        "compared": len(errors),
        **{name: value if isinstance(value, list) else round(value, 4) for name, value in figures.items()},
        "refused": sum(bool(row.get("refused")) for row in rows),
        "wrongly_fits": [name_of(row) for row in rows if wrongly_fits(row)],
        "without_figures": {name_of(row): row.get("error", "") for row in rows if error_of(row) is None},
    }


def name_of(row: Row) -> str:
    """Return a row's case in words."""
    return Case(**row["case"]).name


def line(row: Row) -> str:
    """Return a row in one line, in GB."""
    sizes = " ".join(f"{name} {row[name] / 1e9:.2f}" for name in ("peak", "allocated", "estimate") if row.get(name))
    off = f" {error:+.1%}" if (error := error_of(row)) is not None else ""
    return f"{sizes}{off}{' refused' if row.get('refused') else ''} {name_of(row)} {row.get('error', '')[:120]}"


def versions() -> dict[str, str]:
    """Return the versions of Python and the compilers."""
    found = {"python": sys.version.split()[0]}
    for name in ("jax", "libtpu", "jax-cuda12-plugin"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def estimated(rows: Iterable[Row], only: str) -> list[Row]:
    """Estimate the cases of rows that were compiled."""
    found = []
    for row in rows:
        if only in name_of(row):
            found.append(row | estimate(Case(**row["case"])))
            print(line(found[-1]), flush=True)
    return found


def compiled(record: Path, seed: str, count: int, only: str) -> Row:
    """Compile and estimate the steps that a seed draws and the record does not have; returns the new record."""
    known = json.loads(record.read_text()) if record.exists() else {}
    rows = {name_of(row): row for row in known.get("rows", ())} if known.get("seed") == seed else {}
    for case in draw(seed, count):
        if case.name in rows or only not in case.name:
            continue
        row = compile_case(case) | estimate(case)
        rows[case.name] = row
        known = {"seed": seed, "versions": versions(), "rows": list(rows.values())}
        record.write_text(json.dumps(known, indent=1) + "\n")  # each step, so that a run can be continued
        print(line(row), flush=True)
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", help="of the draw; by default that of the record, else frozen_at()")
    parser.add_argument("--cases", type=int, default=150, help="how many steps are drawn")
    parser.add_argument("--only", default="", help="steps with this in their names")
    parser.add_argument("--list", action="store_true", help="print the steps")
    parser.add_argument("--known", action="store_true", help="estimate the recorded steps of plan_peaks.json")
    parser.add_argument("--json", type=Path, default=DRAWN, help="the record; steps in it are not compiled again")
    parser.add_argument("--write", type=Path, help="write the record as a page")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    if args.write:
        from plan_table import page

        record = json.loads(args.json.read_text())
        args.write.write_text(page(record, summarize(record["rows"])), encoding="utf-8")
        return
    recorded = json.loads(args.json.read_text())["seed"] if args.json.exists() else ""
    seed = args.seed or recorded or frozen_at()
    if args.list:
        print("\n".join(case.name for case in draw(seed, args.cases) if args.only in case.name))
    elif args.known:
        print(json.dumps(summarize(estimated(json.loads(KNOWN.read_text()), args.only)), indent=1))
    else:
        print(json.dumps(summarize(compiled(args.json, seed, args.cases, args.only)["rows"]), indent=1))


if __name__ == "__main__":
    main()
