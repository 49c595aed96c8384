"""Our side of the table in docs/coming_from/fsdp2.md: for each row a function that runs it and asserts its effect."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.commands.main import main

OURS: dict[str, Callable[[], None]] = {}
SLOW: set[str] = set()
"""Rows whose programs are compiled; those of the others are at most lowered."""

TX = optax.sgd(0.1)
WIDTH, HIDDEN, BLOCKS = 32, 16, 3
BATCH = {"x": np.ones((16, WIDTH), np.float32)}


def row(text: str, *, slow: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers the function of a row by the text of the row's first cell."""

    def register(fn: Callable[[], None]) -> Callable[[], None]:
        assert text not in OURS
        OURS[text] = fn
        SLOW.update([text] * slow)
        return fn

    return register


def init_fn(key):
    shapes = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
    return {name: {"kernel": jnp.full(shape, 0.1)} for name, shape in shapes.items()}


def loss_fn(params, batch, key):
    y = jnp.tanh(batch["x"] @ params["w1"]["kernel"]) @ params["w2"]["kernel"]
    return js.Mean((y**2).sum(), y.size)


def init_blocks(key):
    return {"embed": jnp.ones((WIDTH, WIDTH)), "block": jnp.ones((WIDTH, WIDTH)), "head": jnp.ones((WIDTH, 4))}


BLOCK_MODEL = js.Stacked(
    embed=lambda params, batch, key: batch["x"] @ params["embed"],
    block=lambda w, x, key: x + jnp.tanh(x @ w),
    head=lambda params, x, batch, key: js.Mean((x @ params["head"]).sum(), len(x)),
    num_blocks=BLOCKS,
    init=init_blocks,
)


def layout_of(strategy: Any, tx: Any = TX, init: Any = init_fn, **axes: int) -> js.Layout:
    return js.layout(strategy, js.make_mesh(**(axes or {"data": 8})), init, tx)


@cache
def fsdp() -> tuple[js.Layout, js.TrainState]:
    layout = layout_of(js.fsdp("data", min_size=0))
    return layout, js.init(init_fn, TX, layout, 0)


def kernel(tree: Any, name: str = "w1") -> Any:
    return tree[name]["kernel"]


def specs(layout: js.Layout) -> tuple[Any, Any, Any]:
    """How the first kernel's value, gradient and momentum are stored."""
    momentum = layout.opt_state[0].trace
    return tuple(kernel(tree).store for tree in (layout.params, layout.grads, momentum))


MOMENTUM = optax.sgd(0.1, momentum=0.9)
SPLIT, WHOLE = P("data", None), P(None, None)


def program(engine: Any, init: Any = init_fn, loss: Any = loss_fn) -> str:
    """The lowered step under FSDP, as StableHLO, in which the body of a loop is written once."""
    layout = layout_of(js.fsdp("data", min_size=0), init=init)
    return js.make_step(loss, TX, layout, engine=engine).lower(BATCH).as_text()


@cache
def blocks_program(remat: str = "nothing") -> str:
    return program(js.explicit(remat=remat), BLOCK_MODEL.init, BLOCK_MODEL.loss)


def results(text: str, operation: str) -> list[str]:
    """The types of the results of an operation, such as 16x16xf32; a reduce-scatter has a region before its type."""
    found = re.findall(rf'"stablehlo\.{operation}".*?-> tensor<([^>]+)>', text, re.DOTALL)
    assert found, f"no {operation}"
    return found


def trained(tx: Any, strategy: Any, steps: int = 1, **axes: int) -> list[tuple[js.TrainState, Any]]:
    layout = layout_of(strategy, tx, **axes)
    run, step = js.init(init_fn, tx, layout, 0), js.make_step(loss_fn, tx, layout, donate=False)
    seen = []
    for _ in range(steps):
        run, metrics = step(run, BATCH)
        seen.append((run, metrics))
    return seen


# Meshes and strategies


@row('`init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))`')
def _():
    assert dict(js.make_mesh(replica=2, data=4).shape) == {"replica": 2, "data": 4}


@row("`fully_shard(model)` over a 1D mesh")
def _():
    assert specs(layout_of(js.fsdp("data", min_size=0), MOMENTUM)) == (SPLIT, SPLIT, SPLIT)


@row("`fully_shard(model)` over a 2D mesh: copied over the first dimension, split over the second")
def _():
    layout = layout_of(js.hsdp("replica", "data", min_size=0), MOMENTUM, replica=2, data=4)
    assert specs(layout) == (SPLIT, SPLIT, SPLIT)
    assert layout.batch_axes == ("replica", "data")


@row("`DistributedDataParallel`")
def _():
    layout = layout_of(js.ddp("data"), MOMENTUM)
    assert specs(layout) == (WHOLE, WHOLE, WHOLE) and layout.batch_axes == ("data",)


@row("`ZeroRedundancyOptimizer`")
def _():
    assert specs(layout_of(js.zero1("data", min_size=0), MOMENTUM)) == (WHOLE, WHOLE, SPLIT)


@row('`parallelize_module(m, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})`')
def _():
    rules = [("w1/kernel", ("embed", "mlp")), ("w2/kernel", ("mlp", "embed")), *js.RULES]
    params = layout_of(js.tensor(rules), tensor=8).params
    assert (kernel(params, "w1").use, kernel(params, "w2").use) == (P(None, "tensor"), P("tensor", None))


@row("`SequenceParallel()`", slow=True)
def _():
    model, mesh = js.models.gpt(vocab=64, width=32, depth=1, heads=4, seq=16), js.make_mesh(data=2, tensor=4)

    def gathers(rules: Any) -> list[Any]:
        layout = js.layout(js.compose(js.ddp("data"), js.tensor(rules)), mesh, model.init, TX)
        step = js.make_step(model.loss, TX, layout, engine=js.explicit())
        found = js.collectives(step.compile({"tokens": np.zeros((8, 17), np.int32)}), mesh)
        return [one for one in found if (one.kind, one.axes) == ("all-gather", ("tensor",))]

    assert len(gathers([("sequence", "split"), *js.RULES])) > len(gathers(js.RULES))


@row("`context_parallel(...)`")
def _():
    model = js.models.gpt(vocab=64, width=32, depth=1, heads=4, seq=16)
    layout = layout_of(js.compose(js.fsdp("data"), js.context("context")), init=model.init, data=2, context=4)
    assert (layout.batch_axes, layout.sum_axes) == (("data",), ("data", "context"))
    assert "positions over context" in str(layout)


@row("`CPUOffloadPolicy`")
def _():
    layout = layout_of(js.compose(js.fsdp("data", min_size=0), js.offload("opt", min_size=0)), MOMENTUM)
    assert (kernel(layout.opt_state[0].trace).memory, kernel(layout.params).memory) == ("pinned_host", "")


@row("torchft's `LocalSGD`, `DiLoCo`", slow=True)
def _():
    strategy = js.compose(js.fsdp("data", min_size=0), js.local("replica", every=2))
    (first, _), (second, _) = trained(TX, strategy, steps=2, replica=2, data=4)
    start = np.full((WIDTH, HIDDEN), 0.1, np.float32)
    assert np.array_equal(kernel(first.params), start), "the shared parameters wait for the second step"
    assert not np.array_equal(kernel(second.params), start)


# Arrays


@row("`DTensor` with `Shard(0)`")
def _():
    layout, run = fsdp()
    assert kernel(layout.params).store == SPLIT == kernel(run.params).sharding.spec


@row("`Replicate()`")
def _():
    assert kernel(layout_of(js.ddp("data")).params).store == P(None, None)


@row("`Partial()`")
def _():
    layout = layout_of(js.hsdp("replica", "data", min_size=0), replica=2, data=4)
    for x in jax.tree.leaves(js.init(init_fn, TX, layout, 0).params):
        by_index = {}
        for part in x.addressable_shards:
            assert np.array_equal(part.data, by_index.setdefault(str(part.index), part.data)), "copies are equal"
        assert len(by_index) == 4


@row("`tensor.full_tensor()`")
def _():
    layout, run = fsdp()
    assert np.array_equal(kernel(js.logical(run, layout).params), kernel(init_fn(None)))


@row("`distribute_tensor(x, mesh, [Shard(0)])`")
def _():
    _, run = fsdp()
    assert {part.data.shape for part in kernel(run.params).addressable_shards} == {(WIDTH // 8, HIDDEN)}


@row('`torch.device("meta")`, `to_empty`, `init_weights`')
def _():
    keys = []

    def init(key):
        keys.append(key)
        return init_fn(key)

    layout = layout_of(js.fsdp("data", min_size=0), init=init)
    js.init(init, TX, layout, 0)
    assert keys and all(isinstance(key, jax.core.Tracer) for key in keys)


# The program of a step


@row("`fully_shard(block)` for each block, so that one is gathered at a time")
def _():
    gathered = results(blocks_program(), "all_gather")
    assert f"{WIDTH}x{WIDTH}xf32" in gathered and not any(x.startswith(f"{BLOCKS}x") for x in gathered)


@row("`reshard_after_forward=True`")
def _():
    outside = 1  # the embedding, which is as large as a block
    assert results(blocks_program(), "all_gather").count(f"{WIDTH}x{WIDTH}xf32") == 2 + outside


@row("`reshard_after_forward=False`")
def _():
    assert sorted(results(program(js.explicit()), "all_gather")) == ["16x32xf32", "32x16xf32"]


@row("`MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`")
def _():
    text = program(js.explicit(precision="bf16", reduce_dtype=jnp.float32))
    assert all(x.endswith("xbf16") for x in results(text, "all_gather"))
    assert all(x.endswith("xf32") for x in results(text, "reduce_scatter"))


@row("`set_requires_gradient_sync(False)`, `no_sync()`", slow=True)
def _():
    layout = layout_of(js.fsdp("data", min_size=0))

    def reductions(engine: Any) -> int:
        program = js.make_step(loss_fn, TX, layout, engine=engine).compile(BATCH)
        return sum(one.count for one in js.collectives(program, layout.mesh) if one.kind == "reduce-scatter")

    every, once = (reductions(js.explicit(microbatches=2, scatter=when)) for when in ("each", "end"))
    assert every == 2 * once > 0


@row("`checkpoint_wrapper(block)`")
def _():
    products = [blocks_program(remat).count("stablehlo.dot_general") for remat in ("nothing", "everything")]
    assert products[0] > products[1], "the backward pass computes the block's products again"


@row("torchtitan's `enable_fsdp_float8_all_gather`")
def _():
    text = program(js.explicit(gather_dtype=js.wire.fp8()))
    assert any("f8E4M3" in x or "i8" in x for x in results(text, "all_gather"))


@row("`Schedule1F1B`, `ScheduleInterleaved1F1B`, `ScheduleZBVZeroBubble`")
def _():
    for name in ("one_f_one_b", "interleaved", "zero_bubble"):
        assert js.pipelined(schedule=name, microbatches=4).microbatches == 4


# Around the step


@row("`clip_grad_norm_(params, 1.0)`", slow=True)
def _():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    ((_, metrics),) = trained(clipped, js.fsdp("data", min_size=0))
    assert metrics["grad_norm"] > 2
    np.testing.assert_allclose(metrics["update_norm"], 1.0, rtol=1e-5)


@row("`torch.distributed.checkpoint`", slow=True)
def _():
    layout, run = fsdp()
    other = layout_of(js.ddp("data"))
    js.save("checkpoint", run, layout)
    restored = js.restore("checkpoint", other)
    assert kernel(restored.params).sharding.spec == WHOLE
    assert np.array_equal(kernel(restored.params), kernel(run.params))


@row("`torchrun --nproc-per-node 8`", slow=True)
def _():
    program = "import os; open('process' + os.environ['JAXSHARD_PROCESS_ID'], 'w')"
    assert main(["launch", "-n", "2", "--", sys.executable, "-c", program]) == 0
    assert {file.name for file in Path().glob("process*")} == {"process0", "process1"}
