"""Promised kinds of which a program shows nothing: the audit says that it could not read them, and is not satisfied."""

import optax
import pytest

import jaxshard as js
from jaxshard.checks.collectives.compare import audit, compare
from jaxshard.checks.collectives.promise import promise
from jaxshard.checks.programs.report import audit_program
from jaxshard.core.layout import human_bytes
from tests.checks.programs.texts import FSDP, SCATTER, SUM, gather, step_text
from tests.notebook_page import check_shows_text
from tests.toys import linen_toy, quick_compile


@pytest.fixture(scope="module", params=["explicit", "auto"])
def audited(request):
    """A step under fsdp, its promise, and what the compiled program moves."""
    toy, mesh = linen_toy(), js.make_mesh(data=8)
    layout = js.layout(js.fsdp(min_size=0), mesh, toy.init_fn, optax.sgd(0.1))
    engine = getattr(js, request.param)()
    with quick_compile():
        found = audit(js.make_step(toy.loss_fn, optax.sgd(0.1), layout, engine=engine), toy.batch).found
    return promise(layout, engine, toy.loss_fn, toy.batch), found


def test_gathers_that_the_program_does_not_show_are_not_as_promised(audited):
    promised, found = audited
    whole = compare(promised, found)
    assert whole.ok and not whole.unread and "could not read" not in str(whole)
    blind = compare(promised, [one for one in found if one.kind != "all-gather"])
    (line,) = blind.unread
    size = sum(one.bytes for one in promised.expected if one.kind == "all-gather" and one.shape and one.axes)
    assert line.startswith(f"all-gather over data: {human_bytes(size)} promised")
    assert not blind.surprises and not blind.ok
    assert blind.verdict == "could not read all-gather over data" and "could not read" in str(blind)
    assert check_shows_text(blind).text[0] == blind.verdict


@pytest.mark.parametrize(
    ("lines", "unread"),
    [
        (FSDP, []),
        ((gather(), gather(name="again")), ["sums of gradients over data"]),
        ((SCATTER,), ["gathers of weights over data"]),
        ((SUM,), []),  # it may be a gather that is written as a sum
        ((), ["gathers of weights over data", "sums of gradients over data"]),
    ],
)
def test_a_text_without_the_collectives_of_its_strategy(lines, unread):
    report = audit_program(step_text(*lines), {"data": 8}, strategy="fsdp")
    assert [one.partition(":")[0] for one in report.comparison.unread] == unread
    assert report.ok is not bool(unread)
    assert report.outcome == (f"could not read {', '.join(unread)}" if unread else "nothing against the strategy")
    assert ("could not read" in str(report)) is bool(unread)
    assert not audit_program(step_text(*lines), {"data": 8}).comparison.unread  # nothing is promised without a strategy
