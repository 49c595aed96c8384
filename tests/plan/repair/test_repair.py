"""`js.plan.repair`: seeded bad models, the edit that repairs each, and what is left alone.

Parity allows 1e-6 of the loss and 1e-5 of gradients and updates, as everywhere.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.checks.collectives.compare import Comparison, Surprise
from jaxshard.checks.collectives.found import Collective
from jaxshard.plan.repair.repair import repair, why_worse
from tests.notebook_page import check_shows_text
from tests.plan.repair import bad_models
from tests.toys import quick_compile

FILE = Path(bad_models.__file__)


def at(needle):
    """The line of the bad models that ends with a comment, or has some text."""
    (number,) = [n for n, line in enumerate(FILE.read_text().splitlines(), 1) if needle in line]
    return f"{FILE}:{number}"


def repaired(name, **options):
    with quick_compile():
        return repair(**getattr(bad_models, name)().arguments(**options))


OUT = "take the constraint out"
EXPLICIT = "engine=js.explicit()"
EXPECTED = {
    "gathered_logits": [("# gathered_logits", OUT, "")],
    "replicated_moments": [("# replicated_moments", OUT, "")],
    "split_head": [
        (
            "the strategy",
            "put the rules ('kv_heads', 'whole') and ('heads', 'whole') in front",
            "js.tensor([('kv_heads', 'whole'), ('heads', 'whole'), *js.RULES])",
        )
    ],
    "missing_constraint": [
        ('jnp.tile(batch["tokens"]', "wrap the result int32[32, 8] of tile", "js.constrain(..., ('batch', None))")
    ],
    "moved_rows": [("the engine", "", EXPLICIT)],
    "sorted_rows": [("# sorted_rows", "take the sort out", "")],
    "wrong_dims": [("the strategy", "leave out your own rules", "js.tensor()")],
    "split_embedding": [("the strategy", "leave out the rule ('embedding', ('embed', 'features'))", "js.tensor()")],
    "transposed_weights": [
        (
            "the strategy",
            "put the rules",
            "js.tensor([('down/kernel', (None, 'mlp')), ('up/kernel', ('mlp', None)), *js.RULES])",
        )
    ],
    "rows_over_tensor": [("the strategy", "split no rows over 'tensor'", "js.batch('data')")],
    "whole_activation": [("# whole_activation", OUT, "")],
    "whole_weight": [("# whole_weight", OUT, "")],
    "scan_over_split_blocks": [("the strategy", "leave out your own rules", "js.tensor()")],
    "sums_in_a_scan": [("the engine", "", EXPLICIT)],
    "loop_over_rows": [("the engine", "", EXPLICIT)],
    "two_views": [("the engine", "", EXPLICIT)],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_bad_model_is_repaired_and_computes_the_same(name):
    repairs = repaired(name)
    assert repairs.ok and not repairs.before.ok, str(repairs)
    made = [(one.edit.place, one.edit.what, one.edit.code) for one in repairs.edits]
    for (place, what, code), (wanted_place, wanted_what, wanted_code) in zip(made, EXPECTED[name], strict=True):
        assert place == (wanted_place if wanted_place.startswith("the ") else at(wanted_place))
        assert what.startswith(wanted_what) and code == wanted_code
    for one in repairs.edits:
        assert one.parity is not None
        one.parity.check()
        assert one.unexpected.after < one.unexpected.before
        assert one.removed
    assert repairs.edits[-1].unexpected.after == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicated_moments", "missing_constraint", "transposed_weights"])
def test_the_repaired_step_trains_as_the_bad_one(name):
    """Three steps of Adam: losses equal to 1e-5."""
    given = getattr(bad_models, name)().arguments()
    repairs = repaired(name)
    assert repairs.ok
    layout = js.layout(given["strategy"], given["mesh"], given["init_fn"], given["tx"])
    bad = js.make_step(given["loss_fn"], given["tx"], layout, engine=given["engine"])
    losses = []
    for step in (bad, repairs.make_step()):
        run = js.init(given["init_fn"], step.tx, step.layout, 0)
        losses.append([])
        for _ in range(3):
            run, metrics = step(run, given["batch"])
            losses[-1].append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][2] < losses[0][0]


@pytest.mark.slow
def test_without_values_a_constraint_is_taken_out_and_nothing_is_run():
    repairs = repaired("gathered_logits", values=False)
    (one,) = repairs.edits
    assert repairs.ok and one.parity is None and one.edit.place == at("# gathered_logits")
    assert (one.unexpected.before, one.unexpected.after) == (2 * 4 * 4 * 8 * 96, 0)  # the logits and their gradient
    text = str(repairs)
    assert text.startswith(f"1 edit removes all surprises:\n1. {at('# gathered_logits')}: take the constraint out\n")
    assert "all-gather over tensor, once, 12.29 kB: f32[4, 8, 96]" in text and "24.58 kB before, 0 B after" in text
    (found,) = repairs.as_dict()["repairs"]
    page = check_shows_text(repairs)
    assert page.text[0] == "1 edit removes all surprises" and {"24.58 kB", "0 B"} <= page.cells
    check_shows_text(one)
    assert found["saved_bytes"] == 24_576 and found["parity"] is None and found["removes"][0]["kind"] == "all-gather"


@pytest.mark.slow
def test_what_no_edit_repairs_says_what_was_tried():
    """Under the explicit engine every row meets those of its own device alone: parity refuses that."""
    repairs = repaired("every_row_with_every_other")
    assert not repairs.ok and not repairs.edits and repairs.after is repairs.before
    why = {one.edit.code: one.why for one in repairs.tried}
    assert "the result is another" in why[EXPLICIT]
    text = str(repairs)
    assert text.startswith("no edit was found for:\n- all-gather over data") and "\ntried:\n- " in text
    assert repairs.as_dict()["unrepaired"] and not repairs.as_dict()["repaired"]
    assert check_shows_text(repairs).text[0] == "no edit was found for"


@pytest.mark.slow
def test_an_edit_that_may_change_values_is_not_made_without_values():
    repairs = repaired("sums_in_a_scan", values=False)
    assert not repairs.ok
    (why,) = [one.why for one in repairs.tried if one.edit.code == EXPLICIT]
    assert why.startswith("not tried")


@pytest.mark.slow
def test_two_mistakes_take_two_edits():
    """A constraint in the loss and one in the optimizer, each on a line of its own."""
    loss, moments = bad_models.whole_activation().arguments(), bad_models.replicated_moments().arguments()
    with quick_compile():
        repairs = repair(**loss | {"tx": moments["tx"]})
    assert repairs.ok, str(repairs)
    assert {one.edit.place for one in repairs.edits} == {at("# whole_activation"), at("# replicated_moments")}


def made_of(*promised, surprise=None):
    """A comparison of all-gathers over data of so many bytes, one of them a surprise."""
    sizes = promised if surprise is None else (*promised, surprise)
    found = [
        Collective("all-gather", ("data",), 1, "f32", ((n // 4,),), (n,), "", (), f"op{n}", "", ((0, 1),))
        for n in sizes
    ]
    return Comparison((), tuple(found), () if surprise is None else (Surprise(found[-1], "not promised"),), ())


@pytest.mark.parametrize(
    ("after", "has_to_save", "why"),
    [
        (made_of(), True, ""),
        (made_of(400), False, ""),  # all that moves is promised
        (made_of(400), True, "moves more in all"),
        (made_of(400, surprise=80), False, "moves something else"),
        (made_of(surprise=100), False, "unexpected: 100 B before, 100 B after"),
    ],
)
def test_why_an_edit_is_not_kept(after, has_to_save, why):
    assert why_worse(made_of(surprise=100), after, has_to_save).startswith(why) is True
    assert bool(why_worse(made_of(surprise=100), after, has_to_save)) is bool(why)


@pytest.mark.slow
def test_an_optimizer_that_is_no_pair_of_functions_is_repaired_inside():
    given = bad_models.replicated_moments().arguments()
    with quick_compile():
        repairs = repair(**given | {"tx": optax.MultiSteps(given["tx"], 2)})
    (one,) = repairs.edits
    assert repairs.ok and one.edit.place == at("# replicated_moments")


SCAN = js.compose(js.fsdp(min_size=0), js.tensor()), {"data": 4, "tensor": 2}, js.explicit(remat="nothing")
STAGES = (
    js.compose(js.fsdp(min_size=0), js.tensor(), js.pipeline()),
    {"data": 2, "tensor": 2, "pipe": 2},
    js.pipelined(microbatches=2),
)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "axes", "engine"), [SCAN, STAGES], ids=["scan", "stages"])
def test_a_model_of_blocks_is_repaired_inside_its_blocks(strategy, axes, engine):
    """The line is in the block, which an engine runs in a scan with its weights gathered inside, or in stages."""

    def block(weights, x, key):
        hidden = js.constrain(jax.numpy.tanh(x @ weights["up"]["kernel"]), ("batch", None))  # all features
        return x + hidden @ weights["down"]["kernel"]

    def init(key):
        up, down = (jax.random.normal(jax.random.fold_in(key, n), (64, 64)) / 8 for n in range(2))
        return {"embed": {}, "block": {"up": {"kernel": up}, "down": {"kernel": down}}, "head": {}}

    model = js.Stacked(
        embed=lambda params, batch, key: batch["x"],
        block=block,
        head=lambda params, x, batch, key: js.Mean((x**2).sum(), x.size),
        num_blocks=4,
        init=init,
    )
    batch = {"x": np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)}
    with quick_compile():
        repairs = repair(model.init, model.loss, bad_models.ADAM, strategy, js.make_mesh(**axes), batch, engine=engine)
    assert not repairs.before.ok and repairs.ok, str(repairs)
    (one,) = repairs.edits
    assert one.edit.what == OUT and one.edit.place.startswith(f"{__file__}:")
    assert (
        Path(__file__).read_text().splitlines()[int(one.edit.place.rpartition(":")[2]) - 1].endswith("# all features")
    )
    assert one.parity is not None and one.parity.ok


def test_a_number_of_tries_below_one_is_refused():
    with pytest.raises(ValueError, match="tries must be at least 1 compilation, got 0"):
        repair(**bad_models.gathered_logits().arguments(), tries=0)
