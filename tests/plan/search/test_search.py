"""`js.plan.search`: what is listed, what arithmetic refuses, the ranking of a toy, and its command."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.commands.main import main
from jaxshard.plan.search import search as module
from jaxshard.plan.search.candidates import candidates
from jaxshard.plan.search.estimate import Estimator
from jaxshard.plan.search.facts import Facts
from jaxshard.plan.search.policies import Policy
from jaxshard.plan.time.network import Group
from tests.engines.programs import tpu
from tests.notebook_page import check_shows_text

WIDTH = 64


def init(key):
    return {"up": jax.random.normal(key, (WIDTH, 4 * WIDTH)), "down": jax.random.normal(key, (4 * WIDTH, WIDTH))}


def loss(params, batch, key):
    errors = (jnp.tanh(batch["x"] @ params["up"]) @ params["down"]) ** 2
    return js.Mean(errors.sum(), errors.size)


ROWS = {"x": jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)}
FACTS = Facts(
    rows=64, depth=8, flops=1e15, weights={(True, False): 2**33, (False, False): 2**30}, opt_ratio=2,
    itemsize=2, policies=(
        Policy("everything", 2**28), Policy("dots", 2**26, again=0.03), Policy("nothing", 2**24, again=1 / 3),
        Policy("out=save,block_in=offload", 2**22, 2**24, again=0.2),
    ),
    block_input=2**24, context_sizes=(2,), pipe_sizes=(2, 4, 8), tensor_share={2: 0.5, 4: 0.25},
)  # fmt: skip


def test_all_ways_divide_what_they_split():
    listed = list(candidates(FACTS, 16, precision="bf16"))
    assert len(set(listed)) == len(listed) > 100
    for one in listed:
        assert math.prod(size for _, size in one.axes) == 16
        assert 64 % (one.row_shards * one.microbatches) == 0
        assert 8 % (one.size("pipe") * one.chunks) == 0
        assert (one.schedule is not None) == (one.size("pipe") > 1) == (one.engine_name == "pipelined")
    assert {one.data for one in listed} == {"fsdp", "hsdp", "zero2", "zero1", "ddp"}


def test_slices_are_crossed_by_rows_and_stages_alone():
    for one in candidates(FACTS, 16, num_slices=4):
        assert 4 % (one.size("tensor") * one.size("context")) == 0
        assert one.size("replica") % 4 == 0 or one.data != "hsdp"


def test_memory_is_bounded_by_what_rests_and_what_is_kept():
    chip = js.plan.chip("TPU v5e")
    estimator = Estimator(FACTS, chip, lambda axes, over: Group(((4, True),), 1))
    listed = {str(one): estimator.estimate(one) for one in candidates(FACTS, 16)}
    whole = 2**33 + 2**30  # parameters in f32; twice that of moments; as much of gradients
    rows = 64 // 16 * 8 * 2**24  # of a device, in all blocks
    assert listed["ddp on data=16, remat nothing"].bytes == 4 * whole + rows
    block = 2**33 // 8 // 2  # one gathered in bf16
    assert listed["fsdp on data=16, remat nothing"].bytes == 4 * whole // 16 + rows + block
    assert listed["fsdp on data=16, remat dots"].bytes == 4 * whole // 16 + 4 * rows + block
    assert listed["fsdp on data=16, remat nothing"].seconds > listed["fsdp on data=16, remat dots"].seconds
    moved = listed["fsdp on data=16, remat out=save,block_in=offload"]
    assert moved.bytes == 4 * whole // 16 + rows // 4 + block and moved.offloaded == rows
    small = Estimator(FACTS, chip._replace(host_bytes=rows), lambda axes, over: Group(((4, True),), 1))
    assert "host's memory" in small.why_too_large(moved) and not estimator.why_too_large(moved)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(module, "_WANTED", 2)


def test_a_toy_is_ranked_with_reasons_and_trains_as_it_was_ranked(few):
    tx = optax.adam(1e-3)
    ranking = js.plan.search(init, loss, tx, ROWS, "v5e:2x4", compile=0)
    assert len(ranking.plans) == 2 and ranking.predicted >= 2 and ranking.listed > 10
    assert [plan.fits for plan in ranking.plans] == [True, True]
    assert "the fastest that fits" in ranking.best.reason and str(ranking.best.candidate) in str(ranking)
    page = check_shows_text(ranking)
    assert [row[1] for row in page.tables[0][1:]] == [str(plan.candidate) for plan in ranking.plans]
    seconds = [plan.middle for plan in ranking.plans]
    assert seconds[0] <= seconds[1] * 1.05
    json.dumps(ranking.as_dict(), allow_nan=False)
    best = ranking.best
    layout = js.layout(best.strategy, js.make_mesh(**best.axes), init, tx)
    step = js.make_step(loss, tx, layout, engine=best.engine)
    _, metrics = step(js.init(init, tx, layout, jax.random.key(0)), {"x": jnp.ones((16, WIDTH))})
    assert jnp.isfinite(metrics["loss"])


def test_nothing_fits_is_an_answer(few):
    chip = js.plan.chip("TPU v5e")._replace(hbm_bytes=1000, usable_bytes=1000)
    ranking = js.plan.search(init, loss, optax.adam(1e-3), ROWS, "v5e:2x4", chip=chip, compile=0)
    assert ranking.best is None and ranking.predicted == 0 and ranking.too_large == ranking.listed
    assert "nothing fits: take more chips" in str(ranking) and "or more of" in str(ranking)
    check_shows_text(ranking)


def test_a_batch_that_devices_do_not_divide_is_named():
    nine = {"x": jax.ShapeDtypeStruct((9, WIDTH), "float32")}
    ranking = js.plan.search(init, loss, optax.sgd(0.1), nine, "v5e:2x2", compile=0)
    assert str(ranking.best.candidate) == "ddp on data=1, tensor=4"  # the hidden dimension of the model is divided

    def init_one(key):  # nothing says that a dimension of it may be split
        return {"table": jax.random.normal(key, (WIDTH,))}

    def loss_one(params, batch, key):
        return js.Mean((batch["x"] @ params["table"]).sum(), len(batch["x"]))

    ranking = js.plan.search(init_one, loss_one, optax.sgd(0.1), nine, "v5e:2x2", compile=0)
    assert ranking.best is None and "9 rows can't be split over 4 devices" in str(ranking)


def test_a_fault_shows_and_leaves_the_others(monkeypatch):
    """A ValueError is a layout that is refused; another error is a fault of the model or of the library."""
    predict = module.predict

    def matrix(key):
        return jax.random.normal(key, (WIDTH, WIDTH))

    def squares(params, batch, key):
        errors = (batch["x"] @ params) ** 2
        return js.Mean(errors.sum(), errors.size)

    def faulty(layout, *args, **options):
        return None + 1 if "replica" in layout.mesh.shape else predict(layout, *args, **options)

    monkeypatch.setattr(module, "predict", faulty)
    monkeypatch.setattr(module, "_WANTED", 6)
    with pytest.warns(UserWarning, match="left out; the first is hsdp on replica=.*TypeError"):
        ranking = js.plan.search(matrix, squares, optax.sgd(0.1), ROWS, "v5e:2x2", compile=0)
    assert ranking.best is not None and any(words.startswith("failed, TypeError") for words in ranking.refused)


@pytest.mark.slow
def test_the_command_writes_plans_as_json(few, capsys):
    words = ["search", "llama-1m", "--change", "depth=1", "--batch", "16", "--seq", "32", "--topology", "v5e:2x2"]
    assert main([*words, "--compile", "0", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    first = result["plans"][0]
    assert first["fits"] is True and math.prod(first["mesh"].values()) == 4 and first["reason"]
    assert (
        main(["plan", "llama-1m", "--batch", "16", "--topology", "v5e:2x2", "--estimate", *first["flags"].split()]) == 0
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nope", "--topology", "v5e:2x2"], "nope: there is no such size; use one of"),
        (["llama-1m", "--topology", "v5e:2x3"], "v5e is not rented as 2x3; near it are"),
        (["llama-1m", "--topology", "v5e:2x2", "--compile", "-1"], "--compile -1: give a number from 0"),
    ],
)
def test_faulty_flags_are_refused_by_name(words, message, capsys):
    assert main(["search", *words]) == 2
    assert message in capsys.readouterr().err


@tpu
@pytest.mark.slow
def test_the_best_are_confirmed_by_the_compiler(few):
    ranking = js.plan.search(init, loss, optax.adam(1e-3), ROWS, "v5e:2x4", compile=1)
    best = ranking.best
    assert best.compiled.fits and best.peak_bytes == best.compiled.allocated_bytes and "by the compiler" in best.reason
    assert dataclasses.asdict(best.candidate) and best.as_dict()["allocated_bytes"] > 0
