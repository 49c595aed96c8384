"""The benchmark of the estimate of memory: the draw of steps, its figures and its page."""

import json

from tests.benchmarks.scripts import BENCHMARKS, script

plan = script("plan")


def test_a_seed_draws_its_cases_again_and_another_one_others(plan):
    first, again, other = (plan.draw(seed, 12) for seed in ("a", "a", "b"))
    assert first == again
    assert {case.name for case in first} != {case.name for case in other}
    assert len({case.name for case in first}) == 12


def test_a_draw_has_every_strategy_engine_policy_chip_and_users_model(plan):
    cases = plan.draw("any", 150)
    assert {case.strategy for case in cases} == {"ddp", "zero1", "zero2", "fsdp", "hsdp"}
    assert {case.engine for case in cases} == {"auto", "explicit", "explicit units", "pipelined"}
    assert {case.remat for case in cases} == {"nothing", "dots", "everything", "block_in=offload"}
    assert {"tensor", "pipe", "context", "expert", "replica"} <= {axis for case in cases for axis in case.axes}
    assert {case.topology.split(":")[0] for case in cases} == {"v5e", "v5p", "v6e", "tpu7x", "h100"}
    assert len({case.model.split("/")[0] for case in cases if "/" in case.model}) == 5


def test_the_pages_show_the_record(plan):
    """The page of all steps, the histogram of the planner's page and the band that a prediction prints."""
    from plan_table import histogram, page

    record = json.loads(plan.DRAWN.read_text())
    summary = plan.summarize(record["rows"])
    docs = BENCHMARKS.parent / "docs"
    assert (docs / "records" / "planner_table.md").read_text() == page(record, summary)
    errors = [error for row in record["rows"] if (error := plan.error_of(row)) is not None]
    assert histogram(errors) in (docs / "guides" / "planner.md").read_text()
    assert not summary["wrongly_fits"]
    assert summary["within_band"] >= 0.95
