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


def layout(strategy=None, mesh=None, init=TOY.init_fn):
    return js.layout(strategy or js.pipeline(), mesh or ring(2), init, TX)


def make(engine, made=None, loss=TOY.loss_fn):
    return js.make_step(loss, TX, made or layout(), engine=engine)


def lower(block=MODEL.block, head=MODEL.head):
    model = js.Stacked(MODEL.embed, block, head, num_blocks=8, init=MODEL.init_parts)
    return make(js.pipelined(microbatches=4), layout(init=model.init), model.loss).lower(TOY.batch)


def lower_rows(count):
    both, mesh = js.compose(js.pipeline(), js.ddp()), js.make_mesh(jax.devices()[:4], pipe=2, data=2)
    return make(js.pipelined(microbatches=4), layout(both, mesh)).lower(rows_batch(count))


def without_stages(strategy, axis):
    made = layout(strategy, js.make_mesh(jax.devices()[:2], **{axis: 2}))
    return make(js.pipelined(microbatches=4), made)


NO_STAGES = r"places no blocks in stages; add js\.pipeline\('pipe'\) .* or use js\.explicit"
NO_ENGINE = r"pipeline over 'pipe', which this engine does not run: use engine=js\.pipelined"
OPAQUE = r"is opaque.*js\.Stacked\(embed, block, head.*js\.make_step\(model\.loss"
AGAIN = "axis 'pipe' already splits dim 0 of blocks/b"
OTHER_SIZES = r"for \(stages, chunks, microbatches\) \(4, 2, 4\), but .* say \(2, 2, 8\); make them the same"

VALUES = {
    "fewer micro-batches than devices": (
        lambda: make(js.pipelined(microbatches=3), layout(mesh=ring(4))),
        "3 micro-batches over 4 stages are too few .* use at least 4 .* or gpipe",
    ),
    "rows that micro-batches do not divide": (
        lambda: make(js.pipelined(microbatches=5)).lower(TOY.batch),
        "a batch of 96 rows does not divide into 5 micro-batches over 1 devices; use a multiple of 5 rows, such as",
    ),
    "rows that both do not divide": (
        lambda: lower_rows(12),
        "12 rows does not divide into 4 micro-batches over 2 devices; .* multiple of 8",
    ),
    "rows that data does not divide": (
        lambda: lower_rows(13),
        "weights has 13 rows, which the 2 devices of axis 'data' do not divide",
    ),
    "fewer blocks than stages": (
        lambda: layout(js.pipeline(chunks=8)),
        "8 blocks are fewer than the 16 stages of chunks=8 on 2 devices of axis 'pipe'; use chunks=4, or a smaller",
    ),
    "a stash of no name": (
        lambda: js.pipelined(microbatches=4, stash="blocks"),
        "stash must be one of 'layer', 'stage', 'everything', 'dots', a function .*, got 'blocks'",
    ),
    "a schedule of no name": (
        lambda: js.pipelined(microbatches=4, schedule="1f2b"),
        "there is no schedule '1f2b'; use one of gpipe, one_f_one_b, interleaved, zero_bubble",
    ),
    "a table in a file": (
        lambda: js.pipelined(microbatches=4, schedule="mine.csv"),
        r"read the table first, js\.schedules\.Schedule\.from_csv\('mine\.csv'\)",
    ),
    "chunks for gpipe": (
        lambda: make(js.pipelined(microbatches=4, schedule="gpipe")),
        r"js\.pipeline\(.*chunks=1\)",
    ),
    "a table for another pipeline": (
        lambda: make(js.pipelined(microbatches=8, schedule=js.schedules.interleaved(4, 4, chunks=2))),
        OTHER_SIZES,
    ),
    "two axes": (lambda: js.pipeline(("x", "y")), "name one mesh axis, whose devices form the ring of stages, got"),
    "no axis": (lambda: js.pipeline(()), "name one mesh axis, whose devices form the ring of stages, got"),
    "the engine alone": (lambda: without_stages(js.ddp(), "data"), NO_STAGES),
    "the engine and its axis alone": (lambda: without_stages(js.ddp("pipe"), "pipe"), NO_STAGES),
    "the strategy under auto": (lambda: make(js.auto()), NO_ENGINE),
    "the strategy under explicit": (lambda: make(js.explicit()), NO_ENGINE),
    "the strategy without an engine": (lambda: make(None), NO_ENGINE),
    "the strategy twice": (lambda: layout(js.compose(js.pipeline(), js.pipeline())), AGAIN),
    "its axis filled": (lambda: layout(js.compose(js.fsdp("pipe", min_size=0), js.pipeline())), AGAIN),
    "a model without blocks": (
        lambda: layout(init=nnx_toy().init_fn),
        r"no parameter is stacked by blocks.*js\.Stacked.*model\.init",
    ),
    "a block that returns something else": (
        lambda: lower(block=lambda params, x, key: (x @ params["w"])[:, :3]),
        r"block must return what it receives.*float32\[24, 7\].*float32\[24, 3\]",
    ),
}
TYPES = {
    "a schedule that is no table": (
        lambda: js.pipelined(microbatches=4, schedule=3),
        r"schedule must be a name such as 'interleaved' or a js\.schedules\.Schedule, got 3",
    ),
    "an opaque loss": (lambda: make(js.pipelined(microbatches=4), loss=lambda *args: TOY.loss_fn(*args)), OPAQUE),
    "the evaluation for the loss": (lambda: make(js.pipelined(microbatches=4), loss=MODEL.evaluate), OPAQUE),
    "a head without a weight": (
        lambda: lower(head=lambda params, x, batch, key: jnp.square(x).mean()),
        r"needs a head that says its weight: return js\.Mean\(total, weight\)",
    ),
    "a weight of activations": (
        lambda: lower(head=lambda params, x, batch, key: js.Mean(x.sum(), jnp.abs(x).sum())),
        "the weight of the loss depends on activations.*from the batch alone",
    ),
    "a head with a state": (
        lambda: lower(head=lambda params, x, batch, key: js.Loss(js.Mean(x.sum(), x.size), state={"mean": x.mean()})),
        r"js\.Loss\(state=\.\.\.\), but a js\.Stacked model has no state",
    ),
}


@pytest.mark.parametrize("name", [*VALUES, *TYPES])
def test_a_mistake_is_refused_with_the_remedy(name):
    call, message = (VALUES | TYPES)[name]
    with pytest.raises(ValueError if name in VALUES else TypeError, match=f"(?s){message}"):
        call()


@pytest.mark.parametrize("number", [True, 0, -1, 1.5, "2", None])
def test_chunks_and_micro_batches_that_are_no_number(number):
    with pytest.raises(ValueError, match=f"pipeline: chunks must be a whole number from 1 on, got {number!r}"):
        js.pipeline(chunks=number)
    with pytest.raises(ValueError, match="microbatches must be a whole number from 1 on"):
        js.pipelined(microbatches=number)
