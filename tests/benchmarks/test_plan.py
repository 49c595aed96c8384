"""The table of predicted and compiled peaks: median error at most 5 %, worst 15 %, never "fits" for what is refused."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.programs import tpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("plan", "plan_cases", "plan_table", "compiler_dump", "user_models")


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import plan

    yield plan
    for name in MODULES:
        sys.modules.pop(name, None)


def seed_of_the_commit() -> str:
    """The commit's hash, so that each one draws other cases."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=BENCHMARKS, capture_output=True, text=True)
    return found.stdout.strip() or "no commit"


def test_a_seed_draws_its_cases_again_and_another_one_others(plan):
    first, again, other = (plan.draw(seed, 12) for seed in ("a", "a", "b"))
    assert first == again
    assert {case.name for case in first} != {case.name for case in other}
    assert len({case.name for case in [*plan.FIXED, *first]}) == len(plan.FIXED) + 12


def test_the_fixed_cases_hold_every_strategy_engine_and_remat(plan):
    cases = plan.FIXED
    assert {case.strategy for case in cases} == {"ddp", "zero1", "zero2", "fsdp", "hsdp"}
    assert {case.engine for case in cases} == {"auto", "explicit", "explicit units", "pipelined"}
    assert {case.remat for case in cases} == {"nothing", "dots", "everything"}
    assert {case.precision for case in cases} == {"f32", "bf16"}
    assert {"tensor", "pipe", "context", "expert", "replica"} <= {axis for case in cases for axis in case.axes}
    assert {case.topology for case in cases} == {"v5e:4x4", "v5e:16x16", "v5p:4x4x8", "v6e:8x8", "h100:8"}
    assert len({case.model.split("/")[0] for case in cases if "/" in case.model}) == 5


def test_the_page_names_what_is_off(plan):
    from plan_table import page

    def row(index, **more):
        case = plan.FIXED[index]
        return {"name": case.name, "case": case._asdict(), "peak": 100, "predicted_peak": 104, "error": ""} | more

    moved = [{"kind": "all-reduce", "axis": "data", "promised": 0, "bytes": 2 * 10**9, "count": 1}]
    rows = [
        row(
            0,
            collectives=moved,
            substitutes=["all-reduce in place of reduce-scatter over data, 1 times, 2 GB"],
            promised_bytes=10**9,
            found_bytes=3 * 10**9,
        ),
        row(1, predicted_peak=130, predicted_fits=False),
        row(2, refused=True, predicted_fits=True),
    ]
    summary = plan.summarize(rows)
    assert summary["over"] == {rows[1]["name"]: 0.3}
    assert summary["wrongly_fits"] == [rows[2]["name"]]
    text = page(rows, summary, {"jax": "0"}, 2, "7")
    assert "all-reduce in place of reduce-scatter over data: cases 1" in text
    assert "+30.0%" in text and "yes / no" in text and "1 were drawn" in text


def test_a_page_is_updated_by_new_predictions_and_keeps_what_was_compiled(plan):
    from plan_table import page, updated

    def rows(*predicted):
        return [
            {"name": case.name, "case": case._asdict(), "peak": 10**9, "predicted_peak": size, "found_bytes": 7 * 10**9}
            for case, size in zip(plan.FIXED, predicted, strict=False)
        ]

    old, new = rows(2 * 10**9, 10**9), [{**row, "found_bytes": None} for row in rows(10**9, 3 * 10**9)]
    text = page(old, plan.summarize(old), {"jax": "0"}, 2, "7")
    text = updated(text, new, plan.summarize(new))
    assert text == page(rows(10**9, 3 * 10**9), plan.summarize(new), {"jax": "0"}, 2, "7")
    with pytest.raises(ValueError, match=r"is not on the page with 2\.00 GB compiled"):
        updated(text, [{**new[0], "peak": 2 * 10**9}], plan.summarize(new))


@pytest.mark.slow(sampled=False)
@pytest.mark.filterwarnings("ignore:attention", "ignore:tensor")
@tpu
def test_recorded_peaks_are_predicted(plan):
    recorded = json.loads((BENCHMARKS / "plan_peaks.json").read_text())
    rows = []
    for entry in recorded:
        case = plan.Case(**entry["case"])
        if not case.topology.startswith("h100"):
            rows.append({"name": case.name} | entry | plan.predict_case(case))
    assert len(rows) >= 60
    check(plan, rows)
    assert plan.summarize(rows)["median"] <= 0.05


@pytest.mark.slow(sampled=False)
@pytest.mark.filterwarnings("ignore:attention", "ignore:tensor")
@tpu
def test_cases_that_the_commit_draws_are_predicted(plan):
    drawn = [case for case in plan.draw(seed_of_the_commit(), 12) if not case.topology.startswith("h100")][:8]
    rows = [plan.compile_case(case) | plan.predict_case(case) for case in drawn]
    assert all(row.get("peak") for row in rows), [row.get("error") for row in rows]
    check(plan, rows)
    errors = [abs(error) for row in rows if not row.get("refused") and (error := plan.error_of(row)) is not None]
    print(f"median error {statistics.median(errors):.1%} of {len(errors)}")


def check(plan, rows):
    summary = plan.summarize(rows)
    assert not summary["wrongly_fits"]
    assert not summary["over"]
