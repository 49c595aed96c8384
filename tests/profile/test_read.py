"""`js.read_profile`: traces of a real run on CPU devices, and of GPUs and TPUs as XLA writes them."""

import collections
import gzip
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from tests.profile.traces import event, write

TX = optax.sgd(1e-3)
LAYERS, LOOPS = 2, 3
MICRO = 1e-6
HOST = {
    "python": [
        event("train", 0, 10, step_num=7),
        event("$loader.py:3 load", 12, 38),
        event("$loader.py:9 decode", 30, 31),
        event("train", 40, 50, step_num=8),
    ]
}


def init_fn(key):
    return {f"layer_{i}": jax.random.normal(jax.random.fold_in(key, i), (64, 64)) / 8 for i in range(LAYERS)}


def loss_fn(params, batch, key):
    x = batch["x"]
    for i in range(LAYERS):
        x = jax.nn.relu(x @ params[f"layer_{i}"])
    x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x @ x.T) @ x / 64, None), x, length=LOOPS)
    return js.Mean((x**2).sum(), x.size)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A profile of three steps under FSDP, and the collectives of the compiled step."""
    folder = tmp_path_factory.mktemp("trace")
    layout = js.layout(js.fsdp("data", min_size=1), js.make_mesh(data=8), init_fn, TX)
    batch = {"x": np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)}
    step = js.make_step(loss_fn, TX, layout, engine=js.explicit())
    js.fit(js.init(init_fn, TX, layout, key=0), step, [batch] * 6, steps=6, profile=folder)
    return folder, js.read_profile(folder), js.collectives(step.compile(batch), layout.mesh)


def test_every_step_of_every_device_is_timed(real):
    _, profile, _ = real
    devices = {f"CPU:{i}" for i in range(8)}
    assert {(one.step, one.device) for one in profile.steps} == {(step, one) for step in (3, 4, 5) for one in devices}
    assert profile.version == jax.__version__
    for one in profile.steps:
        assert one.compute > 0 and one.exposed > 0 and one.idle > 0
        assert one.compute + one.exposed + one.idle == pytest.approx(one.seconds)


def test_collectives_are_those_of_the_compiled_step_with_the_audits_lines(real):
    _, profile, compiled = real
    found = {one.name: (one.kind, one.count, one.source) for one in profile.operations if one.is_collective}
    arrays = {one.op: f"{len(one.arrays)} arrays, first: " if len(one.arrays) > 1 else "" for one in compiled}
    assert found == {one.op: (one.kind, one.count, f"{arrays[one.op]}{one.place}") for one in compiled}
    gathers = [one for one in profile.exposed if one.kind == "all-gather"]
    assert len(gathers) == LAYERS and all(__file__ in one.source for one in gathers)
    # CPU devices run one operation at a time, so that every collective is waited for.
    assert sum(one.exposed for one in profile.operations) == pytest.approx(
        sum(one.exposed for one in profile.steps) / len(profile.steps), rel=0.05
    )


def test_a_loop_counts_as_the_operations_in_it(real):
    _, profile, _ = real
    kinds = collections.Counter(one.kind for one in profile.operations)
    assert "while" not in kinds and LOOPS in {round(one.count) for one in profile.operations}


def test_gaps_add_up_to_idle_time(real):
    _, profile, _ = real
    idle = sum(one.idle for one in profile.steps) / len(profile.steps)
    assert sum(one.seconds for one in profile.gaps) == pytest.approx(idle)


def test_it_prints_tables_and_gives_json(real):
    _, profile, _ = real
    text = str(profile)
    for words in ("milliseconds per step", "exposed collectives", "the host meanwhile", "test_read.py:", "CPU:"):
        assert words in text
    assert "more" in text and len(text.splitlines()) < 60
    written = profile.as_dict()
    assert len(written["steps"]) == 24 and written["exposed"][0]["kind"] in (
        "all-gather",
        "reduce-scatter",
        "all-reduce",
    )


def test_a_tpus_operations_belong_to_its_own_steps(tmp_path):
    """Gathers that end after other work are exposed where the device waits for their end."""
    planes = {
        "/host:CPU": HOST,
        "/device:TPU:0": {
            "Steps": [event("7", 100, 140), event("8", 160, 200)],
            "XLA Modules": [event("jit_step(9)", 100, 140), event("jit_step(9)", 160, 200)],
            "XLA Ops": [
                event("%while.1 = (f32[8]{0}) while(%t), condition=%c, body=%b", 100, 125),
                event("%all-gather-start.1 = (f32[1]{0}, f32[8]{0}) all-gather-start(%p)", 100, 101),
                event("%fusion.2 = f32[8]{0} fusion(%q), kind=kLoop", 101, 120),
                event("%all-gather-done.1 = f32[8]{0} all-gather-done(%s)", 120, 125),
                event("%convolution.3 = f32[8]{0} convolution(%a, %b)", 125, 140),
                event("%fusion.2 = f32[8]{0} fusion(%q), kind=kLoop", 160, 190),
                event("%all-reduce.4 = f32[8]{0} all-reduce(%g), to_apply=%add", 190, 200),
            ],
            "Async XLA Ops": [event("%all-gather-start.1", 100, 125)],
        },
        "/device:TPU:0 SparseCore 0": {"XLA Ops": [event("%fusion.9", 100, 200)]},
    }
    profile = js.read_profile(write(tmp_path / "host.xplane.pb", planes))
    assert [(one.step, one.device) for one in profile.steps] == [(7, "TPU:0"), (8, "TPU:0")]
    times = [(one.seconds, one.compute, one.exposed, one.idle) for one in profile.steps]
    assert times == [pytest.approx([40 * MICRO, 34 * MICRO, 6 * MICRO, 0]), pytest.approx([60e-6, 30e-6, 10e-6, 20e-6])]
    exposed = [(one.kind, one.name, one.count, one.exposed) for one in profile.exposed]
    assert exposed == [
        ("all-reduce", "all-reduce.4", 0.5, pytest.approx(5 * MICRO)),
        ("all-gather", "all-gather-done.1", 0.5, pytest.approx(2.5 * MICRO)),
        ("all-gather", "all-gather-start.1", 0.5, pytest.approx(0.5 * MICRO)),
    ]
    (gap,) = profile.gaps
    assert (gap.host, gap.count, gap.seconds) == ("(nothing that the profiler saw)", 0.5, pytest.approx(10 * MICRO))


def gpu(*streams, launches=()):
    lines = {f"Stream #{13 + at}(Compute)": events for at, events in enumerate(streams)}
    host = {"Host Threads/1": [event("cuLaunchKernelEx", at, at + 1, correlation_id=key) for key, at in launches]}
    return {"/host:CPU": HOST, "/host:CUPTI": host, "/device:GPU:0": lines}


def kernel(name, start, end, key, **stats):
    return event(name, start, end, correlation_id=key, hlo_module="jit_step", program_id=6, **stats)


def test_on_a_gpu_a_step_runs_what_was_launched_in_it_and_streams_overlap(tmp_path):
    compute = [
        kernel("gemm", 5, 15, 1, hlo_op="dot.1"),
        kernel("gemm", 22, 42, 2, hlo_op="dot.1"),  # launched in step 7, it still runs when step 8 is launched
        kernel("gemm", 60, 70, 3, hlo_op="dot.1"),
    ]
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    communication = [kernel(nccl, 32, 52, 4, hlo_op="all-reduce-start.1"), kernel(nccl, 65, 69, 5)]
    launches = [(1, 1), (2, 2), (4, 3), (3, 45), (5, 46)]
    planes = gpu(compute, communication, launches=launches)
    profile = js.read_profile(write(tmp_path / "host.xplane.pb", planes))
    times = [(one.step, one.seconds, one.compute, one.exposed, one.idle) for one in profile.steps]
    assert times == [pytest.approx((7, 52e-6, 30e-6, 10e-6, 12e-6)), pytest.approx((8, 18e-6, 10e-6, 0, 8e-6))]
    overlapped, hidden = (one for one in profile.operations if one.is_collective)
    assert (overlapped.name, overlapped.seconds, overlapped.exposed) == pytest.approx(
        ("all-reduce-start.1", 10 * MICRO, 5 * MICRO)
    )
    assert (hidden.name, hidden.seconds, hidden.exposed) == (nccl, pytest.approx(2 * MICRO), 0)
    # From 0 to 5 and from 15 to 22; from 52 to 60 the host only waits.
    gaps = {one.host: one.seconds for one in profile.gaps}
    assert gaps == pytest.approx({"train": 2.5e-6, "loader.py:3 load": 3.5e-6, "(nothing that the profiler saw)": 4e-6})


def test_kernels_of_a_cuda_graph_are_named_by_their_program_and_launched_in_the_hosts_plane(tmp_path):
    """JAX 0.11: a graph's kernels share its launch and hlo_op, and the step before still runs at the next launch."""
    compiled = jax.jit(lambda x: jnp.sin(x @ x)).lower(jnp.ones((8, 8))).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    operation = re.search(r"%(\S+\.\d+) = f32\[8,8\]\S* dot\(", module.to_string())[1]
    kernel_name = operation.replace(".", "_")
    graph = {"hlo_op": "command_buffer_145"}
    kernels = [
        kernel(kernel_name, 5, 42, 1, **graph),
        kernel("nvjet_sm90_tst_128x128", 42, 45, 1, **graph),
        kernel(kernel_name, 45, 90, 2, **graph),
    ]
    host = {"python": [*HOST["python"], event("cuGraphLaunch", 2, 3, correlation_id=1)]}
    host["python"].append(event("cuGraphLaunch", 41, 42, correlation_id=2))
    planes = {"/host:CPU": host, "/device:GPU:0": {"Stream #14(Compute)": kernels}}
    file = write(tmp_path / "host.xplane.pb", planes, version="0.11.2", module=module.as_serialized_hlo_module_proto())
    profile = js.read_profile(file)
    assert {one.step: one.compute for one in profile.steps} == pytest.approx({7: 40 * MICRO, 8: 45 * MICRO})
    found = {one.name: (one.kind, one.count, one.source) for one in profile.operations}
    assert found.keys() == {operation, "nvjet_sm90_tst_128x128"}
    assert found[operation][:2] == ("dot", 1) and __file__ in found[operation][2]


def test_a_collective_of_several_arrays_says_how_many_and_the_first(tmp_path):
    def total(a, b):
        return jax.lax.psum((a.sum(0), b.sum(0)), "data")

    summed = jax.shard_map(total, mesh=js.make_mesh(data=8), in_specs=jax.P("data"), out_specs=jax.P())
    compiled = jax.jit(summed).lower(jnp.ones((8, 4)), jnp.ones((8, 3))).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    operation = re.search(r"%(\S+) = \(f32\S* f32\S* all-reduce\(", module.to_string())[1]
    kernels = [kernel(name, 5, 42, 1, hlo_op=operation) for name in ("ncclDevKernel_AllReduce",)]
    file = write(tmp_path / "host.xplane.pb", gpu(kernels), module=module.as_serialized_hlo_module_proto())
    (found,) = js.read_profile(file).operations
    assert found.kind == "all-reduce" and found.source.startswith(f"2 arrays, first: {__file__}:"), found


def test_what_ran_before_the_first_marked_step_is_left_out(tmp_path):
    before = kernel("gemm", -30 + 40, 18, 9, hlo_op="dot.1")  # launched before the trace began
    host = {"python": [event("train", 15, 20, step_num=3)]}
    planes = gpu([before, kernel("gemm", 20, 30, 1, hlo_op="dot.2")], launches=[(9, 0), (1, 16)])
    profile = js.read_profile(write(tmp_path / "host.xplane.pb", planes | {"/host:CPU": host}))
    (step,) = profile.steps
    assert (step.step, step.seconds, step.compute) == (3, pytest.approx(12 * MICRO), pytest.approx(10 * MICRO))
    assert [one.name for one in profile.operations] == ["dot.2"]


def test_the_newest_trace_of_all_hosts_is_read(tmp_path):
    runs = tmp_path / "plugins" / "profile"
    planes = gpu([kernel("gemm", 5, 15, 1, hlo_op="dot.1")])
    for run, host in [("2026_01_02_00_00_00", "a"), ("2026_01_02_00_00_00", "b"), ("2026_01_01_00_00_00", "c")]:
        write(runs / run / f"{host}.xplane.pb", planes)
    profile = js.read_profile(tmp_path)
    assert [one.device for one in profile.steps] == ["a GPU:0", "b GPU:0"]
    assert profile.file == str(runs / "2026_01_02_00_00_00")


def test_a_folder_that_has_no_trace(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent: there is no such folder"):
        js.read_profile(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"no trace \(no \*.xplane.pb file\) is in it; write one with --profile"):
        js.read_profile(tmp_path)
    (tmp_path / "host.trace.json.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match=r"the browser's copy of a trace; copy the .xplane.pb file next to it"):
        js.read_profile(tmp_path)
    with pytest.raises(ValueError, match="gs://bucket/run: files are read and written in a mounted file system"):
        js.read_profile("gs://bucket/run")


def test_a_trace_that_can_not_be_read(real, tmp_path):
    folder, _, _ = real
    (whole,) = folder.rglob("*.xplane.pb")
    file = tmp_path / "host.xplane.pb"
    for damaged in (whole.read_bytes()[:-100], b"PK\x03\x04 of something else"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="cut off, or no trace of JAX's profiler"):
            js.read_profile(file)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="no step is marked in this trace; profile with"):
        js.read_profile(file)
    write(file, {"/host:CPU": {"python": [event("$a.py:1 f", 0, 1)]}}, version="0.9.0")
    with pytest.raises(ValueError, match=r"no step is marked in this trace by JAX 0\.9\.0; .*StepTraceAnnotation"):
        js.read_profile(file)
    thunks = [event("dot.1", 1, 2, hlo_op="dot.1")]  # an older jaxlib, which names no device
    write(file, {"/host:CPU": HOST | {"worker": thunks}}, version="0.4.30")
    with pytest.raises(ValueError, match=r"by JAX 0\.4\.30, only the host's; this version of jaxshard reads"):
        js.read_profile(file)
    write(
        file, gpu([kernel("gemm", 5, 15, 1)], launches=[(1, 1)]) | {"/host:CPU": {"t": [event("s", 9, 9, step_num=1)]}}
    )
    with pytest.raises(ValueError, match="no operation was launched in a marked step"):
        js.read_profile(file)
