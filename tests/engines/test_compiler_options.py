"""What a step is compiled with: the options of its chips, the user's before them, and what they make of collectives."""

from __future__ import annotations

import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.compiler.topology import topology_mesh
from jaxshard.engines.compiler_options import OVERLAP, overlap_options
from tests.engines.programs import gpt_program, tpu, traffic

MESH = js.make_mesh(jax.devices()[:2], data=2)


def mesh_of(kind, platform, count=2):
    device = SimpleNamespace(device_kind=kind, platform=platform)
    return SimpleNamespace(size=count, devices=np.array([device] * count))


def compile_step(engine):
    def loss(params, batch, key):
        return js.Mean(jnp.square(batch["x"] @ params["w"]).sum(), batch["x"].shape[0])

    layout = js.layout(js.fsdp(min_size=0), MESH, lambda key: {"w": jnp.ones((4, 4))}, optax.sgd(0.1))
    batch = {"x": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    return js.make_step(loss, optax.sgd(0.1), layout, engine=engine).compile(batch)


def test_a_chip_has_its_own_options_and_a_cpu_and_a_single_device_have_none():
    for kind, options in OVERLAP.items():
        mesh = mesh_of(kind, kind if kind == "gpu" else "tpu")
        assert overlap_options(mesh) == options and options
        assert js.auto().compiler_options(mesh) == options
    assert overlap_options(mesh_of("NVIDIA H100 80GB HBM3", "gpu")) == OVERLAP["gpu"]
    assert overlap_options(mesh_of("TPU v5 lite", "tpu", count=1)) == {}
    assert overlap_options(mesh_of("TPU v99", "tpu")) == {}
    assert js.explicit().compiler_options(MESH) is None


def test_gathers_of_8_bit_numbers_are_not_fused_with_all_else():
    """The compiler for v5e ends the process otherwise; `tests/adapt/test_lora_pod.py` compiles such a step."""
    mesh, params = mesh_of("TPU v5 lite", "tpu"), {"base": jnp.ones((4, 4), jnp.int8), "scale": jnp.ones(4)}
    left_out = OVERLAP["TPU v5 lite"].keys() - js.explicit().compiler_options(mesh, params).keys()
    assert left_out == {"xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions"}
    assert js.explicit().compiler_options(mesh, {"scale": params["scale"]}) == OVERLAP["TPU v5 lite"]


def test_options_of_the_user_come_before_those_of_the_chip():
    name, *others = OVERLAP["TPU v5 lite"]
    mesh, chosen = mesh_of("TPU v5 lite", "tpu"), {name: False, "xla_mine": 3} | dict.fromkeys(others)
    for engine in (js.auto(options=chosen), js.explicit(options=chosen), js.pipelined(microbatches=2, options=chosen)):
        assert engine.compiler_options(mesh) == {name: False, "xla_mine": 3}
        assert engine.compiler_options(MESH) == {name: False, "xla_mine": 3}
        assert engine.options == chosen and hash(engine) is not None
    needed = js.explicit(units=[object], options=chosen).compiler_options(MESH)
    assert {"xla_disable_hlo_passes", name, "xla_mine"} == set(needed)


def test_printing_an_engine_shows_the_options_of_every_chip():
    lines = str(js.explicit(options={"xla_mine": True})).splitlines()
    assert lines[0] == repr(js.explicit(options={"xla_mine": True})) and lines[1] == "compiler options:"
    assert [line.split(":")[0].strip() for line in lines[2:]] == [*OVERLAP, "others"]
    for kind, line in zip(OVERLAP, lines[2:], strict=False):
        assert all(f"{name}=" in line for name in (*OVERLAP[kind], "xla_mine"))
    assert lines[-1] == "  others: xla_mine=true"
    assert str(js.auto()).splitlines()[-1] == "  others: none"


def test_an_option_that_the_compiler_does_not_know_is_its_own_error_by_name():
    before = dict(os.environ)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compile_step(js.explicit(options={"xla_no_such_option": True}))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        compile_step(js.auto(options={"xla_no_such_option": True}))
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["xla_a"], "options must be a dict from names"),
        ("xla_a=true", "options must be a dict from names"),
        ({"xla_a": [1]}, r"'xla_a': \[1\] is no option"),
        ({3: True}, "3: True is no option"),
    ],
)
def test_what_is_no_option_is_refused(options, message):
    with pytest.raises(TypeError, match=message):
        js.explicit(options=options)


SMALL = {"vocab": 256, "width": 256, "depth": 2, "heads": 2, "seq": 64}
TOPOLOGIES = {
    "TPU v4": "v4:2x2x1",
    "TPU v5 lite": "v5e:2x2",
    "TPU v5": "v5p:2x2x1",
    "TPU v6 lite": "v6e:2x2",
    "TPU7x": "tpu7x:2x2x1",
}


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_every_chip_takes_its_options_and_the_audit_sees_what_they_move(kind):
    """What runs on SparseCores too, where TPU7x puts it by itself. Some chips write a gather as an all-reduce.

    On v6e no gather is waited for.
    """
    mesh = topology_mesh(TOPOLOGIES[kind], data=-1)
    assert mesh.devices.flat[0].device_kind == kind
    engine = js.explicit(remat="nothing", compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    program = gpt_program(mesh, js.fsdp(min_size=0), engine, **SMALL)
    each = 2 * sum(x.size for x in jax.tree.leaves(program.layout.shapes.params))
    assert sum(traffic(program).values()) > 2 * each  # gathered and reduced, in bf16
    offloaded = any("sparse_core" in name for name in OVERLAP.get(kind, {}))
    text = program.compiled.as_text()
    assert ("sparsecore" in text) == (offloaded or kind == "TPU7x")
    gathers = [one for one in js.collectives(text, mesh) if one.kind == "all-gather"]
    assert kind != "TPU v6 lite" or (gathers and not any(one.synchronous for one in gathers))
