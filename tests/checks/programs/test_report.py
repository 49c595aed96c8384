"""The audit of a compiled step from its text alone: what each collective moves, and what a strategy says to it."""

import jax
import optax
import pytest

import jaxshard as js
from jaxshard.checks.programs.report import audit_program
from tests.checks.programs.texts import AT, FSDP, GROUPS, PAIRS, ROWS, SCATTER, SUM, WHOLE, gather, step_text
from tests.notebook_page import check_shows_text
from tests.toys import gpt_toy, quick_compile

DATA = {"data": 8}
EXCHANGE = f"%e = f32[20,512]{{1,0}} all-to-all(%hidden), {GROUPS}, dimensions={{0}}, {AT}"
ACTIVATIONS = gather("hidden", "160,512", 0, name="act")


def whys(*lines, strategy="fsdp", axes=DATA, microbatches=1, **changes):
    found = audit_program(step_text(*lines, **changes), axes, strategy=strategy, microbatches=microbatches)
    return [one.why for one in found.comparison.surprises], found


def test_a_step_of_fsdp_is_as_promised_and_each_array_is_known():
    why, found = whys(*FSDP)
    assert why == [] and found.ok and not found.comparison.missing
    assert [(row["kind"], row["axis"], row["moves"], row["count"], row["bytes"]) for row in found.rows()] == [
        ("reduce-scatter", "data", "gradient", 1, 4 * 1024 * 512),
        ("all-gather", "data", "weight", 2, 2 * 4 * 1024 * 512),
    ]
    assert [(one["role"], one["arrays"], one["bytes"]) for one in found.as_dict()["arguments"]] == [
        ("parameter", 1, 4 * 1024 * 64),
        ("optimizer state", 1, 4 * 1024 * 64),
        ("batch", 1, 4 * 20 * 1024),
    ]
    page = check_shows_text(found)
    assert page.text[0] == found.headline
    assert ["reduce-scatter", "data", "gradient", "1", "2.10 MB", "2.10 MB"] in page.tables[1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (gather(name="third"), "state.params['up']: 3 times; fsdp gathers each weight 2 times at most"),
        (gather("moment", name="m"), "no strategy communicates moments of the optimizer"),
        (ACTIVATIONS, "activation gathered over data: every device gets the rows of all"),
        (EXCHANGE, "activation moved by all-to-all over data: no strategy promises that"),
        (SUM.replace("%s ", "%s2 "), "by its shape the gradient of state.params['up']: 2 times; fsdp sums it once"),
        (f"%p = f32[20,512]{{1,0}} collective-permute(%hidden), {PAIRS}, {AT}", "no strategy promises that"),
    ],
)
def test_what_fsdp_does_not_promise_is_a_surprise(line, why):
    found, audit = whys(*FSDP, line)
    assert len(found) == 1 and why in found[0] and not audit.ok
    assert audit.as_dict()["surprises"][0]["place"] == "/home/user/train.py:12"
    assert check_shows_text(audit).text[0].split("; ")[-1].startswith("fsdp: 1 surprise (")


def test_an_all_reduce_in_place_of_a_reduce_scatter_is_no_surprise_but_is_told():
    why, found = whys(*FSDP[:2], SUM)
    assert why == [] and found.comparison.substitutes == ("all-reduce in place of reduce-scatter over data, 2.10 MB",)


def test_logits_are_gathered_by_no_strategy_over_any_axis():
    names = ("state.params['lm_head']", "state.opt_state[0].mu['lm_head']", "batch['x']")
    line = gather("hidden", "20,1024", 1, name="logits").replace(GROUPS, "replica_groups=[4,2]<=[8]")
    why, _ = whys(line, names=names, axes={"data": 4, "tensor": 2}, sharded=False)
    assert why == ["logits, 1,024 columns of a vocabulary: no strategy gathers them"]


def test_over_tensor_axes_activations_move_as_needed_and_weights_never():
    pairs = "replica_groups=[4,2]<=[8]"
    acts = f"%t = f32[20,512]{{1,0}} all-reduce(%hidden), {pairs}, to_apply=%add, {AT}"
    weight = gather(shape="1024,128").replace(GROUPS, pairs)
    kernel = "sharding={devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}"
    axes = {"data": 4, "tensor": 2}
    assert whys(acts, axes=axes, strategy="ddp", kernel=kernel, moment=kernel)[0] == []
    (why,), _ = whys(acts, weight, axes=axes, strategy="ddp", kernel=kernel, moment=kernel)
    assert why == "state.params['up']: a weight must not be gathered over tensor, which splits its use"


def test_arrays_that_do_not_rest_as_the_strategy_says_are_named():
    _, found = whys(SUM, kernel=WHOLE, moment=WHOLE, shape="1024,512")
    assert [one.split(":")[0] for one in found.comparison.misplaced] == [
        "state.params['up'], f32[1024, 512], 2.10 MB on every device",
        "state.opt_state[0].mu['up'], f32[1024, 512], 2.10 MB on every device",
    ]
    text = step_text(*FSDP).replace(ROWS, WHOLE)
    (line,) = audit_program(text, DATA, strategy="fsdp").comparison.misplaced
    assert line == "batch['weights']: every device along data is given the rows of all"
    _, found = whys(*FSDP, strategy="ddp")
    assert "state.params['up'] is split over data: ddp keeps it replicated there" in found.comparison.misplaced


def test_a_name_that_does_not_tell_what_an_axis_splits_is_refused_with_the_names_that_do():
    with pytest.raises(ValueError, match=r"axis 'rows' does not tell what it splits.*data.*tensor"):
        audit_program(step_text(*FSDP), {"rows": 8}, strategy="fsdp")


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


@pytest.mark.slow
@pytest.mark.parametrize("engine", [js.explicit, js.auto])
@pytest.mark.parametrize("made", ["ddp", "zero1", "zero2", "fsdp"])
def test_steps_of_our_own_keep_their_own_strategy_and_no_other(made, engine):
    text = own_text(made, engine)
    tied = "run.params['embed']['wte']['embedding']: 2 times"  # under auto a tied table is summed for each of its uses

    def is_kept(found):
        return not found.comparison.misplaced and all(tied in str(one) for one in found.comparison.surprises)

    kept = {name for name in ("ddp", "zero1", "zero2", "fsdp") if is_kept(audit_program(text, DATA, strategy=name))}
    assert kept == ({"zero1", "zero2"} if made.startswith("zero") else {made})  # what gradients do between is not seen


def own_text(made, engine=js.explicit):
    toy = gpt_toy(width=128)
    mesh, tx = js.make_mesh(data=8), optax.adam(1e-3)
    layout = js.layout(getattr(js, made)("data"), mesh, toy.init_fn, tx)
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in toy.batch.items()}
    with quick_compile():
        return js.make_step(toy.loss_fn, tx, layout, engine=engine()).compile(batch).as_text()


def test_surprises_of_one_line_and_kind_are_one_entry_unless_all_are_asked_for():
    moments = [gather("moment", name=f"m{dim}", dim=dim) for dim in (0, 1)]
    found = audit_program(step_text(*FSDP, *moments), {"data": 8}, strategy="fsdp")
    assert len(found.comparison.surprises) == 2 and "2 times, 4.19 MB: f32[8192, 64] and 1 more" in str(found)
    assert str(found).count("moments of the optimizer") == 1
    assert found.text(all=True).count("moments of the optimizer") == 2 and found.outcome == "2 surprises"
    assert "state.opt_state[0].mu['up'] is moved for this line alone" in str(found)
    _, rows = whys(*FSDP, ACTIVATIONS)
    assert "jax.lax.with_sharding_constraint(x, P('data', None))" in str(rows)


def test_the_first_line_says_what_was_read_and_the_verdict_whatever_is_known_of_it():
    read = "jit_step for 8 devices (data=8): collectives move 6.29 MB, and the device waits for all of them; "
    known = audit_program(step_text(*FSDP), DATA, strategy="fsdp")
    assert str(known).splitlines()[0] == read + "fsdp: nothing against the strategy"
    unknown = audit_program(step_text(*FSDP, EXCHANGE), {"rows": 8})
    assert unknown.ok and [row["moves"] for row in unknown.rows()] == ["gradient", "weight", "activation"]
    assert unknown.headline.endswith("; no strategy named: nothing was compared") and "(rows=8)" in unknown.headline
    start = gather().replace("all-gather(", "all-gather-start(").replace("= f32[1024,512]{1,0}", "= (f32[1], f32[1])")
    work = "%w = f32[20,512]{1,0} fusion(%hidden), kind=kLoop, calls=%add"
    done = "%d = f32[1024,512]{1,0} all-gather-done(%g)"
    half = audit_program(step_text(start, work, done, SCATTER), DATA)
    assert "collectives move 4.19 MB, and the device waits for 2.10 MB; no strategy" in half.headline
    assert "no collectives; no strategy" in audit_program(step_text(), DATA).headline
