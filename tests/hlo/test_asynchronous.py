"""Collectives that a program starts and ends apart, as versions of XLA print them for TPUs with SparseCores."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.compiler.topology import topology_mesh
from jaxshard.hlo.found import Row, collectives, summary
from tests.engines.programs import tpu
from tests.hlo.programs import GROUPS, TABLES, XY, mesh_of, program

LINE = ', metadata={op_name="jit(step)/collective" stack_frame_id=3}'
WORK = "%w = f32[64,16]{1,0} fusion(%p), kind=kLoop, calls=%add"

ADDED, RAGGED = f"{GROUPS}, to_apply=%add", f"ragged-all-to-all(%q, %q, %i, %i, %i, %i), {GROUPS}"
KINDS = {
    "gather": (f"all-gather(%q), {GROUPS}, dimensions={{0}}", "f32[256,16]", Row("all-gather", ("y",), 1, 16384)),
    "scatter": (f"reduce-scatter(%q), {ADDED}, dimensions={{0}}", "f32[16,16]", Row("reduce-scatter", ("y",), 1, 4096)),
    "sum": (f"all-reduce(%q), {ADDED}", "f32[64,16]", Row("all-reduce", ("y",), 1, 4096)),
    "ragged exchange": (RAGGED, "f32[64,16]", Row("ragged-all-to-all", ("y",), 1, 4096)),
}
"""What runs, its result, and what is to be read of it."""


def _called(runs, result):
    """A computation as SparseCores run it, with the detour through a tuple that libtpu prints."""
    return f"""%called (q0: f32[64,16]) -> {result} {{
  %q0 = f32[64,16]{{1,0}} parameter(0)
  %t = (f32[64,16]{{1,0}}) tuple(%q0)
  %q = f32[64,16]{{1,0}} get-tuple-element(%t), index=0
  %i = s32[4]{{0}} constant({{0,0,0,0}})
  ROOT %c = {result}{{1,0}} {runs}{LINE}
}}, execution_thread="sparsecore"
"""


def _in_wrapper(result):
    """What an earlier libtpu started: a computation with a custom call that calls the collective's."""
    return f"""%wrapper (q: f32[64,16]) -> {result} {{
  %q = f32[64,16]{{1,0}} parameter(0)
  ROOT %o = {result}{{1,0}} custom-call(%q), custom_call_target="offload", called_computations={{%called}}
}}
"""


STATE = "((f32[64,16]{1,0}), f32[256,16]{1,0}, s32[8])"
FORMS = {
    "async-start": [f"%s = {STATE} async-start(%p), calls=%called"],
    "call-start with a token": [
        '%t0 = s32[] custom-call(), custom_call_target="PrepareAsyncCallStart"',
        '%t1 = token[] custom-call(%t0), custom_call_target="PrepareAsyncCallDone"',
        f'%s = {STATE} call-start(%p, %t1), async_execution_thread="sparsecore", to_apply=%called',
    ],
    "custom-call-start()": [
        '%s = ((), (), (s32[8], /*index=1*/s32[0])) custom-call-start(), async_execution_thread="sparsecore", '
        'custom_call_target="TODO(b/1)", called_computations={%called}',
        WORK.replace("%w", "%w0"),
        f"%u = {STATE} custom-call-update(%s, %p)",
    ],
    "offload-start()": [
        "%s = ((), (), s32[8]) offload-start(), calls=%wrapper",
        WORK.replace("%w", "%w0"),
        f"%u = {STATE} offload-update(%s, %p)",
    ],
}
"""A start, and what is computed before the operands are there. The last is what a later version may call it."""


def text_of(form, kind, *between):
    runs, result, _ = KINDS[kind]
    begin = [line.replace("f32[256,16]", result) for line in FORMS[form]]
    started, name = ("%u" if "()" in form else "%s"), form.partition("-start")[0]
    end = f"ROOT %d = {result} {name}-done({started})"
    return program("\n".join([*begin, *between, end]), _called(runs, result), _in_wrapper(result), tables=TABLES)


@pytest.mark.parametrize(
    ("form", "kind"),
    [*((form, "gather") for form in FORMS), *(("custom-call-start()", kind) for kind in list(KINDS)[1:])],
)
def test_what_a_sparse_core_runs_is_read_whatever_its_start_is_called(form, kind):
    (found,) = collectives(text_of(form, kind), mesh_of(**XY))
    assert summary([found]) == (KINDS[kind][2],)
    assert found.source == "/home/user/train.py:12" and found.synchronous and not found.conditional
    (beside,) = collectives(text_of(form, kind, WORK), mesh_of(**XY))
    assert not beside.synchronous


def test_scalars_and_buffers_hide_no_collective():
    """Between start and end a loop counts its turns and a compiler hands out buffers: nothing to compute meanwhile."""
    idle = [
        "%one = s32[] constant(1)",
        "%n = s32[] add(%one, %one)",
        '%b = f32[64,16]{1,0} custom-call(), custom_call_target="AllocateBuffer"',
    ]
    assert collectives(text_of("custom-call-start()", "gather", *idle), mesh_of(**XY))[0].synchronous
    scan = "%n = f32[] reduce(%p, %one), dimensions={0,1}, to_apply=%add"
    assert not collectives(text_of("custom-call-start()", "gather", *idle[:1], scan), mesh_of(**XY))[0].synchronous


OFFLOADED = {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True
    for kind in ("all_gather", "all_reduce", "reduce_scatter")
}


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_gathers_scatters_and_sums_of_every_chip(topology):
    """With code; v5p and v6e by themselves and on SparseCores, on which TPU7x puts collectives by itself."""
    mesh = topology_mesh(topology, x=-1)

    def read(function, given, made, options):
        shape = jax.ShapeDtypeStruct((4096, 2048), jnp.float32, sharding=NamedSharding(mesh, given))
        mapped = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
        found = collectives(jax.jit(mapped).lower(shape).compile(compiler_options=options), mesh)
        return [one for one in found if one.kind != "collective-permute"]  # shards that are no whole tiles

    size = 4096 * 2048 * 4
    programs = {
        "all-gather": (lambda x: lax.all_gather(x, "x", tiled=True), P("x"), P()),
        "reduce-scatter": (lambda x: lax.psum_scatter(x, "x", tiled=True), P(), P("x")),
        "all-reduce": (lambda x: lax.psum(x, "x"), P(), P()),
    }
    for kind, made in programs.items():
        for options in ({}, OFFLOADED) if topology[:3] in ("v5p", "v6e") else ({},):
            (found,) = read(*made, options)
            assert (found.kind, found.axes, found.bytes, found.count) == (kind, ("x",), size, 1)
            assert found.synchronous and not found.conditional
