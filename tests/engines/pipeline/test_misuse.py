"""Mistakes that are easily made with a pipeline: refused before anything is compiled, with the remedy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from tests.engines.pipeline.pipes import residual_block, ring, rows_batch, stack_toy
from tests.toys import nnx_toy

TX = optax.sgd(0.1)
TOY = stack_toy(residual_block, 8)
MODEL = TOY.loss_fn.model
BOTH = js.compose(js.pipeline(), js.ddp())


def layout(strategy=None, mesh=None, init=TOY.init_fn):
    return js.layout(strategy or js.pipeline(), mesh or ring(2), init, TX)


def make(engine, made=None, loss=TOY.loss_fn):
    return js.make_step(loss, TX, made or layout(), engine=engine)


def two_by_two():
    return js.make_mesh(jax.devices()[:4], pipe=2, data=2)


# Numbers.


def test_fewer_micro_batches_than_devices():
    with pytest.raises(ValueError, match=r"3 micro-batches over 4 stages are too few .* use at least 4 .* or gpipe"):
        make(js.pipelined(microbatches=3), layout(mesh=ring(4)))


def test_rows_that_micro_batches_do_not_divide():
    message = (
        "a batch of 96 rows does not divide into 5 micro-batches over 1 devices; use a multiple of 5 rows, such as"
    )
    with pytest.raises(ValueError, match=message):
        make(js.pipelined(microbatches=5)).lower(TOY.batch)


def test_rows_that_micro_batches_and_the_data_axis_do_not_divide():
    step = make(js.pipelined(microbatches=4), layout(BOTH, two_by_two()))
    with pytest.raises(
        ValueError, match=r"12 rows does not divide into 4 micro-batches over 2 devices; .* multiple of 8"
    ):
        step.lower(rows_batch(12))
    with pytest.raises(ValueError, match="weights has 13 rows, which the 2 devices of axis 'data' do not divide"):
        step.lower(rows_batch(13))


@pytest.mark.parametrize("chunks", [True, False, 0, -1, 1.5, "2", None])
def test_chunks_that_are_no_number(chunks):
    with pytest.raises(ValueError, match=f"pipeline: chunks must be a whole number from 1 on, got {chunks!r}"):
        js.pipeline(chunks=chunks)


def test_fewer_blocks_than_stages():
    message = (
        "8 blocks are fewer than the 16 stages of chunks=8 on 2 devices of axis 'pipe'; use chunks=4, or a smaller"
    )
    with pytest.raises(ValueError, match=message):
        layout(js.pipeline(chunks=8))


@pytest.mark.parametrize("microbatches", [0, -1, 2.0, "4", True])
def test_micro_batches_that_are_no_number(microbatches):
    with pytest.raises(ValueError, match="microbatches must be a whole number from 1 on"):
        js.pipelined(microbatches=microbatches)


# Names.


@pytest.mark.parametrize("stash", ["blocks", 3])
def test_a_stash_of_no_name(stash):
    message = f"stash must be one of 'layer', 'stage', 'everything', 'dots', a function .*, got {stash!r}"
    with pytest.raises(ValueError, match=message):
        js.pipelined(microbatches=4, stash=stash)


def test_a_schedule_of_no_name():
    message = "there is no schedule '1f2b'; use one of gpipe, one_f_one_b, interleaved, zero_bubble"
    with pytest.raises(ValueError, match=message):
        js.pipelined(microbatches=4, schedule="1f2b")


def test_a_table_in_a_file_is_read_first():
    with pytest.raises(ValueError, match=r"read the table first, js\.schedules\.Schedule\.from_csv\('mine\.csv'\)"):
        js.pipelined(microbatches=4, schedule="mine.csv")


def test_a_schedule_that_is_no_table():
    with pytest.raises(
        TypeError, match=r"schedule must be a name such as 'interleaved' or a js\.schedules\.Schedule, got 3"
    ):
        js.pipelined(microbatches=4, schedule=3)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_the_remedy_for_chunks_where_a_schedule_has_none(schedule):
    with pytest.raises(ValueError, match=r"js\.pipeline\(.*chunks=1\)"):
        make(js.pipelined(microbatches=4, schedule=schedule))


def test_a_table_for_another_pipeline():
    message = (
        r"'interleaved' is for \(stages, chunks, microbatches\) \(4, 2, 4\), but .* say \(2, 2, 8\); make them the same"
    )
    with pytest.raises(ValueError, match=message):
        make(js.pipelined(microbatches=8, schedule=js.schedules.interleaved(4, 4, chunks=2)))


@pytest.mark.parametrize("axis", [("x", "y"), ()])
def test_an_axis_that_is_not_one(axis):
    with pytest.raises(ValueError, match="pipeline: name one mesh axis, whose devices form the ring of stages, got"):
        js.pipeline(axis)


# Strategies and engines that do not fit.


@pytest.mark.parametrize(("strategy", "mesh"), [(js.ddp(), {"data": 2}), (js.ddp("pipe"), {"pipe": 2})])
def test_the_engine_without_the_strategy(strategy, mesh):
    made = layout(strategy, js.make_mesh(jax.devices()[:2], **mesh))
    with pytest.raises(
        ValueError, match=r"places no blocks in stages; add js\.pipeline\('pipe'\) .* or use js\.explicit"
    ):
        make(js.pipelined(microbatches=4), made)


@pytest.mark.parametrize("engine", [js.auto(), js.explicit(), None], ids=["auto", "explicit", "default"])
def test_the_strategy_without_the_engine(engine):
    with pytest.raises(
        ValueError, match=r"pipeline over 'pipe', which this engine does not run: use engine=js\.pipelined"
    ):
        make(engine)


@pytest.mark.parametrize(
    "strategy",
    [js.compose(js.pipeline(), js.pipeline()), js.compose(js.fsdp("pipe", min_size=0), js.pipeline())],
    ids=["twice", "filled"],
)
def test_the_axis_of_the_pipeline_used_again(strategy):
    with pytest.raises(ValueError, match="axis 'pipe' already splits dim 0 of blocks/b"):
        layout(strategy)


# Models.


def test_a_model_without_stacked_blocks():
    with pytest.raises(ValueError, match=r"(?s)no parameter is stacked by blocks.*js\.Stacked.*model\.init"):
        layout(init=nnx_toy().init_fn)


@pytest.mark.parametrize("loss", [lambda *args: TOY.loss_fn(*args), MODEL.evaluate], ids=["a function", "evaluate"])
def test_an_opaque_loss(loss):
    with pytest.raises(TypeError, match=r"(?s)is opaque.*js\.Stacked\(embed, block, head.*js\.make_step\(model\.loss"):
        make(js.pipelined(microbatches=4), loss=loss)


def lower(block=MODEL.block, head=MODEL.head):
    model = js.Stacked(MODEL.embed, block, head, num_blocks=8, init=MODEL.init_parts)
    return make(js.pipelined(microbatches=4), layout(init=model.init), model.loss).lower(TOY.batch)


def test_a_block_that_returns_something_else():
    with pytest.raises(ValueError, match=r"(?s)block must return what it receives.*float32\[24, 7\].*float32\[24, 3\]"):
        lower(block=lambda params, x, key: (x @ params["w"])[:, :3])


def test_a_head_without_a_weight():
    with pytest.raises(TypeError, match=r"needs a head that says its weight: return js\.Mean\(total, weight\)"):
        lower(head=lambda params, x, batch, key: jnp.square(x).mean())


def test_a_weight_that_depends_on_activations():
    with pytest.raises(TypeError, match=r"the weight of the loss depends on activations.*from the batch alone"):
        lower(head=lambda params, x, batch, key: js.Mean(x.sum(), jnp.abs(x).sum()))


def test_a_head_with_a_state():
    with pytest.raises(TypeError, match=r"js\.Loss\(state=\.\.\.\), but a js\.Stacked model has no state"):
        lower(head=lambda params, x, batch, key: js.Loss(js.Mean(x.sum(), x.size), state={"mean": x.mean()}))
