"""What a layout prints: a screen at most, however large the model, and every array on request."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from tests.notebook_page import check_shows_text


def make(strategy, mesh, params, tx):
    shapes = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), params, is_leaf=is_shape)
    init_fn = lambda key: jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)  # noqa: E731
    return js.layout(strategy, js.make_mesh(**mesh), init_fn, tx)


def is_shape(node):
    return isinstance(node, tuple)


def transformer(depth, width=512):
    block = {
        "attn": {"query": {"kernel": (width, 8, 64)}, "out": {"kernel": (8, 64, width)}},
        "norm": {"scale": (width,)},
    }
    return {"embedding": (32000, width), "pos_embedding": (128, width)} | {f"block_{i}": block for i in range(depth)}


def test_a_summary_in_full():
    strategy = js.compose(js.zero2("data"), js.tensor())
    made = make(strategy, {"data": 4, "tensor": 2}, transformer(24), optax.adam(1e-3))
    assert str(made).splitlines() == [
        "mesh: data=4, tensor=2; batch rows over data",
        "role   arrays  bytes/device   split",
        "param      74      58.25 MB   99.7%",
        "grad       74      14.60 MB  100.0%",
        "opt       149      29.20 MB  100.0%",
        "largest arrays                  role            bytes/device  size / axes",
        "embedding                       param               32.77 MB  [32000 / tensor, 512]",
        "embedding                       grad opt            24.58 MB  [32000 / tensor, 512 / data]",
        "block_*/attn/out/kernel x 24    param               12.58 MB  [8 / tensor, 64, 512]",
        "block_*/attn/query/kernel x 24  param               12.58 MB  [512, 8 / tensor, 64]",
        "block_*/attn/out/kernel x 24    grad opt             9.44 MB  [8 / tensor, 64 / data, 512]",
        "block_*/attn/query/kernel x 24  grad opt             9.44 MB  [512 / data, 8 / tensor, 64]",
        "pos_embedding                   param              262.14 kB  [128, 512]",
        "block_*/norm/scale x 24         param grad opt     196.61 kB  [512]",
        "... and 2 other kinds of arrays",
        "whole: 1 array, 262.14 kB: the rule *pos_embed*",
        "split by js.shard alone: 3 arrays, 196.61 kB: the rule *pos_embed*",
        "whole: 72 arrays, 147.46 kB: small, under 16384 elements",
        "... and 2 more such lines",
        "all 297 arrays: layout.explain()",
    ]
    assert len(made.explain().splitlines()) == 297 + 3


@pytest.mark.parametrize("depth", [1, 3, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        (js.ddp(), {"data": 8}),
        (js.fsdp(), {"data": 8}),
        (js.compose(js.zero1("data"), js.tensor()), {"data": 4, "tensor": 2}),
    ],
)
def test_at_most_20_lines_of_100_columns(strategy, mesh, depth):
    odd = {f"odd{'x' * i}{'/very_long_name' * 9}": (i + 1, 3, 3, 3, 3, 3, 3) for i in range(depth)}
    with_odd = transformer(depth) | odd
    tensor = js.tensor([("*/very_long_name", "whole"), *js.RULES])
    strategy = js.compose(js.zero1("data"), tensor) if "tensor" in mesh else strategy
    lines = str(make(strategy, mesh, with_odd, optax.adafactor(1e-3))).splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 100


def test_what_stays_whole_is_said_with_the_reason_and_the_bytes():
    strategy = js.compose(js.fsdp("data"), js.tensor([("kv", "whole"), ("a", ("kv", None)), *js.RULES]))
    params = {"a": (256, 256), "key": {"kernel": (256, 1, 64)}, "b": {"kernel": (256, 4)}, "pos_embed": (1, 255, 255)}
    text = str(make(strategy, {"data": 4, "tensor": 2}, params, optax.sgd(0.1)))
    assert "split by js.shard alone: 2 arrays, 131.07 kB: the rule a\n" in text
    assert "split by js.shard alone: 2 arrays, 32.77 kB: 1 kv_heads on each of 2 devices: key/kernel\n" in text
    small = str(make(js.fsdp(), {"data": 8}, {"a": (64, 64), "b": (5,), "c": ()}, optax.sgd(0.1)))
    assert "whole: 4 arrays, 32.81 kB: small, under 16384 elements\n" in small
    assert "whole: 2 arrays, 8 B: one element\n" in small


def test_a_notebook_shows_the_summary_and_folds_the_table():
    made = make(js.fsdp(), {"data": 8}, {"<b>": (256, 256)} | {f"w{i}": (8,) for i in range(600)}, optax.sgd(0.1))
    page = check_shows_text(made)
    *_, all_arrays = page.tables
    assert any("<b>" in row[1] for row in all_arrays) and len(all_arrays) == 1001
    assert "... and 202 more: layout.explain()" in page.text and "all 1,202 arrays" in page.text
    roles, largest, _ = page.tables
    assert roles[1] == ["param", "601", "51.97 kB", "93.2%"]
    assert largest[1] == ["<b>", "param grad", "65.54 kB", "[256 / data, 256]"]


def test_a_pipeline_of_many_stages_folds_its_devices():
    parts = lambda key: {"block": {"w": jnp.zeros((256, 256))}, "embed": {}, "head": {}}  # noqa: E731
    model = js.Stacked(lambda *a: None, lambda *a: None, lambda *a: None, num_blocks=16, init=parts)
    made = js.layout(js.pipeline(chunks=1), js.make_mesh(pipe=8), model.init, optax.sgd(0.1))
    lines = str(made).splitlines()
    assert lines[1:4] == ["pipeline: 16 blocks in 8 stages of 2", "  pipe=0: blocks 0-1", "... and 7 more such lines"]
    assert "[1, 8 / pipe, 2, 256, 256]" in str(made)
