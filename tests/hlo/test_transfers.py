"""Programs for several TPU slices: transfers between them, and the groups of one slice on all of them."""

from __future__ import annotations

import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.checks.collectives.compare import audit
from jaxshard.checks.collectives.compiler_choices import torus_sizes
from jaxshard.compiler.topology import topology_mesh
from jaxshard.hlo.found import collectives
from tests.engines.programs import tpu
from tests.hlo.programs import XY, gpt_shapes, mesh_of, program

TARGET = '_xla_megascale_target="{1,2}x{0:3}",'


@pytest.fixture
def two_slices(monkeypatch):
    """Eight devices of which four are one slice."""
    monkeypatch.setattr("jaxshard.core.mesh.slice_index", lambda device: device.id // 4)


def transfer(kind, sent="f32[16,8,128]", received="f32[16,8,128]", target=TARGET):
    text = f"""%t = token[] after-all()
    %send = ({sent}, u32[], token[]) send(%p, %t), frontend_attributes={{{target}_xla_megascale_transfer_type="{kind}"}}
    %recv = ({received}, u32[], token[]) recv(%t), frontend_attributes={{{target}_xla_megascale_transfer_type="{kind}"}}
    %sent = token[] send-done(%send), frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime"}}
    ROOT %r = ({received}, token[]) recv-done(%recv)"""
    return program(text).replace("num_partitions=8", "num_partitions=4")


@pytest.mark.parametrize(
    ("kind", "sizes", "found", "shape"),
    [
        ("ALL_REDUCE", {}, "all-reduce", (16, 8, 128)),
        ("REDUCE_SCATTER", {"received": "f32[8,8,128]"}, "reduce-scatter", (16, 8, 128)),
        ("ALL_GATHER", {"received": "f32[32,8,128]"}, "all-gather", (32, 8, 128)),
        ("ALL_TO_ALL", {"target": ""}, "all-to-all", (16, 8, 128)),
        ("ONE_TO_ONE", {"target": ""}, "collective-permute", (16, 8, 128)),
    ],
)
def test_a_send_and_a_recv_are_one_collective_over_the_axis_of_the_slices(two_slices, kind, sizes, found, shape):
    (one,) = collectives(transfer(kind, **sizes), mesh_of(**XY))
    assert (one.kind, one.axes, one.shapes, one.dtype) == (found, ("x",), (shape,), "f32")


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp", "hsdp x tensor", "fsdp"])
def test_programs_of_two_slices_keep_the_promise(name):
    axes, strategy = {
        "hsdp": ({"replica": 2, "data": 8}, js.hsdp()),
        "hsdp x tensor": ({"replica": 2, "data": 2, "tensor": 4}, js.compose(js.hsdp(), js.tensor())),
        "fsdp": ({"data": 16}, js.fsdp()),
    }[name]
    toy = gpt_shapes(32, vocab=512, width=256, depth=2, heads=4, seq=128)
    tx = optax.adam(1e-3)
    layout = js.layout(strategy, topology_mesh("v5e:2x4", num_slices=2, **axes), toy.init_fn, tx)
    engine = js.explicit(compute_dtype=jnp.bfloat16)
    comparison = audit(js.make_step(toy.loss_fn, tx, layout, engine=engine), toy.batch)
    assert comparison.ok, str(comparison)
    if name == "hsdp":  # a quarter of the whole gradients, 1,743,360 in f32, would be far too much between slices
        (row,) = [row for row in comparison.rows() if row["axis"] == "replica" and row["count"]]
        assert row["kind"] == "all-reduce"
        assert 4 * 1_743_360 / 8 <= row["bytes"] < 4 * 1_743_360 / 4


@tpu
@pytest.mark.slow
def test_a_single_axis_over_a_torus_of_three_dimensions_is_named_with_the_remedy():
    toy = gpt_shapes(64, vocab=512, width=1024, depth=1, heads=8, seq=32)
    tx = optax.sgd(1.0)

    def compared(strategy, **axes):
        layout = js.layout(strategy, topology_mesh("v5p:4x4x4", **axes), toy.init_fn, tx)
        return audit(js.make_step(toy.loss_fn, tx, layout, engine=js.explicit()), toy.batch)

    single = compared(js.fsdp(), data=64)
    assert single.ok
    (sums,) = [line for line in single.substitutes if "all-reduce in place of reduce-scatter over data" in line]
    assert "'data' covers 3 dimensions of the torus" in sums
    assert "data0=4, data1=4, data2=4" in sums and "--mesh data0=4,data1=4,data2=4" in sums
    assert any(one.kind == "all-gather" for one in single.found)  # the torus is closed to rings
    assert "other kinds or dtypes than promised" in str(single)
    split = compared(js.fsdp(("x", "y", "z")), x=4, y=4, z=4)
    assert split.ok
    assert not any(
        "torus" in line or line.startswith("all-reduce in place of all-gather") for line in split.substitutes
    )
    assert torus_sizes(topology_mesh("v5p:4x4x4", x=4, y=4, z=4), "x") == (4,)
