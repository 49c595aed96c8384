"""Batches with arrays that have no rows: lookup tables, the nodes and edges of graphs."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.toys import Toy, assert_equal_runs, normal, one_device, recording_step, sharded, trained

pytestmark = pytest.mark.usefixtures("compiled_quickly")

FSDP = js.fsdp(min_size=0)
SPLIT = js.compose(FSDP, js.without_rows("table"))
RNG = np.random.default_rng(0)


def mesh():
    return js.make_mesh(data=8)


def graphs():
    """16 graphs as lists of all their nodes and edges; the first has 10 nodes, the last none, the others 5."""
    sizes = np.array([10, *[5] * 14, 0], np.int32)
    senders, receivers = RNG.integers(0, 80, (2, 37)).astype(np.int32)
    return {
        "nodes": RNG.normal(size=(80, 4)).astype(np.float32),
        "senders": senders,
        "receivers": receivers,
        "sizes": sizes,
        "y": RNG.normal(size=(16, 3)).astype(np.float32),
    }


def init_fn(key):
    return {"message": normal(0, 4, 13) / 4, "out": normal(1, 13, 3) / 4}


def graph_loss(params, batch, key):
    messages = jnp.tanh(batch["nodes"] @ params["message"])
    nodes = jax.ops.segment_sum(messages[batch["senders"]], batch["receivers"], len(batch["nodes"]))
    owner = jnp.repeat(jnp.arange(16), batch["sizes"], total_repeat_length=len(batch["nodes"]))
    error = jnp.square(jax.ops.segment_sum(nodes, owner, 16) @ params["out"] - batch["y"])
    return js.Mean(error.sum(), error.size)


def table_batch(rows=16):
    return {
        "x": RNG.integers(0, 9, rows, dtype=np.int32),
        "y": RNG.normal(size=(rows, 3)).astype(np.float32),
        "table": RNG.normal(size=(9, 4)).astype(np.float32),
        "scale": np.float32(2),
    }


def table_loss(params, batch, key):
    error = jnp.square(batch["scale"] * jnp.tanh(batch["table"][batch["x"]] @ params["message"]) @ params["out"])
    return js.Mean(jnp.square(error - batch["y"]).sum(), batch["y"].size)


def test_graphs_run_unmarked_under_auto_and_what_is_whole_is_said_once():
    """As `assert_equal_runs`. Three arrays have 16 or 80 elements, two 37, which the devices do not divide."""
    toy = Toy(init_fn, graph_loss, graphs(), 0.01)
    with pytest.warns(
        UserWarning, match=r"16 is taken for the number of rows.*replicated: nodes: 80, receivers: 37"
    ) as said:
        trace, layout = sharded(toy, FSDP, mesh(), js.auto())
    assert len(said) == 1 and "js.without_rows('nodes', 'receivers', 'senders')" in str(said[0].message)
    assert_equal_runs(trace, one_device(toy))
    placed = layout.batch_placements(graphs())
    assert placed["y"].store == jax.sharding.PartitionSpec("data", None)
    assert placed["nodes"].store == placed["senders"].store.__class__(None, None)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "engine",
    [js.explicit(microbatches=2), js.auto(), js.auto(microbatches=2)],
    ids=["explicit-2", "auto", "auto-2"],
)
def test_named_tables_are_whole_in_every_micro_batch_and_not_communicated(engine):
    """As `assert_equal_runs`."""
    toy = Toy(init_fn, table_loss, table_batch(), 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = recording_step(toy, SPLIT, mesh(), engine)
        assert_equal_runs(trained(step, toy), one_device(toy))
    assert step.layout.rows_mask(toy.batch) == {"x": True, "y": True, "table": False, "scale": False}
    audit = js.audit(step, toy.batch)
    assert audit.ok
    if engine == js.explicit(microbatches=2):
        assert sorted((c.kind, s) for c in audit.found for s in c.shapes if s) == [
            ("all-gather", (4, 16)),
            ("all-gather", (16, 3)),
            ("reduce-scatter", (4, 16)),
            ("reduce-scatter", (16, 3)),
        ]


@pytest.mark.slow
def test_stages_of_a_pipeline_have_tables_whole():
    """As `assert_equal_runs`."""

    def embed(params, batch, key):
        return batch["table"][batch["x"]] @ params["in"]

    def block(params, x, key):
        return x + jnp.tanh(x @ params["w"])

    def head(params, x, batch, key):
        error = jnp.square(batch["scale"] * x @ params["out"] - batch["y"])
        return js.Mean(error.sum(), error.size)

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"in": (4, 8), "out": (8, 3)}
        rest = {name: jax.random.normal(k, shape) / 4 for k, (name, shape) in zip(keys, shapes.items())}
        return rest | {"block": {"w": jax.random.normal(keys[2], (8, 8)) / 4}}

    model = js.Stacked(embed, block, head, num_blocks=4, init=init)
    toy = Toy(model.init, model.loss, table_batch(), 0.01)
    strategy = js.compose(SPLIT, js.pipeline("pipe", chunks=1))
    engine = js.pipelined(microbatches=2, schedule="one_f_one_b")
    trace, _ = sharded(toy, strategy, js.make_mesh(pipe=2, data=4), engine)
    assert_equal_runs(trace, one_device(toy))


@pytest.mark.parametrize("engine", [js.explicit(), js.auto(microbatches=2)], ids=["explicit", "auto-2"])
def test_where_the_loss_sees_some_rows_arrays_without_rows_must_be_named(engine):
    tx = optax.sgd(0.1)
    layout = js.layout(FSDP, mesh(), init_fn, tx)
    message = (
        r"(?s)same number of rows \(dim 0\), got table: 9, x: 16, y: 16; use js.auto\(\) .* or name those.*without_rows"
    )
    with pytest.raises(ValueError, match=message):
        js.make_step(table_loss, tx, layout, engine=engine).lower(table_batch())
    with pytest.raises(ValueError, match=message):
        js.parity(init_fn, table_loss, tx, FSDP, mesh(), table_batch(), engine=engine)


@pytest.mark.slow
def test_evaluation_pads_rows_and_no_tables():
    """A last batch of 5 rows; unnamed it is refused, for it does not say what to pad."""
    tx, batches = optax.sgd(0.1), [table_batch(), table_batch(5)]

    def eval_fn(params, batch):
        return {"loss": table_loss(params, batch, None)}

    params = init_fn(jax.random.key(0))
    means = [jax.jit(eval_fn)(params, batch)["loss"] for batch in batches]
    expected = sum(float(m.totals[0]) for m in means) / sum(float(m.weights[0]) for m in means)
    layout = js.layout(SPLIT, mesh(), init_fn, tx)
    run = js.init(init_fn, tx, layout, 0)
    assert js.evaluate(js.make_eval_step(eval_fn, layout), run, batches)["loss"] == pytest.approx(expected, rel=1e-6)
    evaluate = js.make_eval_step(eval_fn, js.layout(FSDP, mesh(), init_fn, tx))
    with pytest.warns(UserWarning, match="replicated: table: 9"):
        first = evaluate(run, batches[0])
    assert float(first["loss"].value) == pytest.approx(float(means[0].value), rel=1e-6)
    with pytest.raises(ValueError, match=r"got table: 9, x: 5, y: 5, so that none can be padded; name those"):
        evaluate(run, batches[1])


def test_batches_place_tables_whole():
    layout = js.layout(SPLIT, mesh(), init_fn, optax.sgd(0.1))
    (batch,) = js.batches([table_batch()], layout)
    assert batch["table"].sharding.is_fully_replicated and not batch["x"].sharding.is_fully_replicated
    local = {name: x for name, x in table_batch().items() if np.ndim(x)}
    (batch,) = js.local_batches([local], layout)
    assert batch["table"].shape == (9, 4) and batch["table"].sharding.is_fully_replicated
    plain = js.layout(FSDP, mesh(), init_fn, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"local_batches: .* got table: 9, x: 16, y: 16; name those"):
        next(iter(js.local_batches([local], plain)))


@pytest.mark.slow
def test_a_name_that_fits_nothing_is_said():
    strategy = js.compose(FSDP, js.without_rows("table", "graph/*"))
    step = js.make_step(table_loss, optax.sgd(0.1), js.layout(strategy, mesh(), init_fn, optax.sgd(0.1)))
    with pytest.warns(UserWarning, match=r"no array of the batch fits 'graph/\*'; its arrays are scale, table, x, y"):
        step.lower(table_batch())


def test_the_size_that_most_arrays_have_is_that_of_the_rows():
    layout = js.layout(FSDP, mesh(), init_fn, optax.sgd(0.1))

    def rows(**sizes):
        batch = {name: np.zeros((size, 2)) for name, size in sizes.items()}
        return [name for name, has_rows in layout.rows_mask(batch).items() if has_rows]

    assert rows(a=1, b=16, c=16) == ["b", "c"]
    assert rows(a=8, b=8, c=16) == ["a", "b"]
    assert rows(a=16, b=8) == ["a"]  # the larger
    assert rows(a=12, b=12, c=8) == ["c"]  # the only one that 8 devices divide
    with pytest.raises(TypeError, match=r"patterns are strings such as 'table', got 3"):
        js.without_rows(3)
