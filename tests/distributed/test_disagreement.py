"""Two real processes that differ in one thing each time: both say what it is, within a minute, and can go on."""

import re

import pytest

from tests.distributed.launched import processes

PROGRAM = """
    def tell(name, fn):
        started = time.monotonic()
        try:
            fn()
        except js.distributed.Disagreement as error:
            assert time.monotonic() - started < 60
            print(f"said {name}: " + str(error).replace(os.linesep, " "), flush=True)
        else:
            print(f"said {name}: no error", flush=True)

    layout = made()
    mesh = js.make_mesh(data=8) if index else js.make_mesh(x=8)
    turned = js.make_mesh(jax.devices()[:: -1 if index else 1], data=8)
    tell("seed", lambda: js.init(init_fn, tx, layout, index))
    tell("mesh", lambda: js.init(init_fn, tx, made(js.fsdp(mesh.axis_names[0]), mesh), 0))
    tell("order", lambda: js.init(init_fn, tx, made(mesh=turned), 0))
    tell("layout", lambda: js.init(init_fn, tx, made(js.zero2("data") if index else js.fsdp("data")), 0))
    run = js.init(init_fn, tx, layout, 0)
    windows = lambda seed, batch=8: js.data.windows(np.arange(10_000), batch=batch, seq=4, seed=seed)
    tell("data", lambda: js.batches(windows(index), layout))
    tell("start", lambda: js.batches(windows(0), layout, start=index))
    tell("rows", lambda: js.batches(windows(0, 8 + 8 * index), layout))
    tell("list", lambda: js.batches([batch(8), batch(8 + 8 * index)], layout, start=1))
    tell("point", lambda: js.batches(windows(0), layout) if index else js.init(init_fn, tx, layout, 0))
    tell("folder", lambda: js.restore(os.path.join("no", "such", str(index)), layout))
    tell("batch", lambda: js.make_step(loss_fn, tx, layout)(run, batch(8 + 8 * index)))

    def other(params, batch, key):
        y = batch["x"] @ params["w"] - params["b"]
        return js.Mean((y**2).sum(), y.size)

    tell("code", lambda: js.make_step(other if index else loss_fn, tx, layout)(run, batch(8)))
    os.environ["XLA_FLAGS"] = f"--xla_one={index} --xla_dump_to={index}"
    tell("flags", lambda: js.init(init_fn, tx, layout, 0))
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={index}"
    step = js.make_step(loss_fn, tx, layout)
    for rows in js.batches([batch(8), batch(8)], layout):
        run, metrics = step(run, rows)
    print("said end:", int(run.step), float(metrics["loss"]), flush=True)
"""

A, B = r"process 0 \(host \S+\)", r"process 1 \(host \S+\)"
EXPECTED = {
    "seed": rf"js.init: .*{B}: random key \[0, 1\] .*, {A}: \[0, 0\]",
    "mesh": rf"js.init: .*{B}: mesh data=8, {A}: x=8",
    "order": rf"js.init: .*{B}: devices of the mesh (\d+ ){{7}}0, {A}: 0( \d+){{7}}$",
    "layout": rf"js.init: .*{B}: layout line 3: param w .*\(None, None\), {A}: line 3: param w .*\('data', None\)",
    "data": rf"js.batches: .*{B}: first row of the data, tokens \w+ \(\d+, .*\), {A}: \w+ \(\d+, .*\)$",
    "start": rf"js.batches: .*{B}: start 1, {A}: 0",
    "rows": rf"js.batches: .*{B}: batch tokens \w+\[16, 5\], {A}: \w+\[8, 5\]",
    "list": rf"js.batches: .*{B}: batch x float32\[16, 64\], {A}: float32\[8, 64\]",
    "point": rf"{B}: call js.batches, {A}: js.init",
    "folder": rf"js.restore: .*{B}: checkpoint none: FileNotFoundError.*1.*, {A}: none: FileNotFoundError",
    "batch": rf"the first step: .*{B}: batch x float32\[16, 64\], {A}: float32\[8, 64\]",
    "code": rf"the first step: .*{B}: program line \d+: .*stablehlo.subtract.*, {A}: line \d+: .*stablehlo.add",
    "flags": rf"js.init: .*{B}: XLA_FLAGS --xla_one=1, {A}: --xla_one=0",
}


@pytest.mark.slow
def test_both_processes_say_what_differs_and_go_on():
    ended = processes(PROGRAM)
    assert [process.status for process in ended] == [0, 0], ended
    for process in ended:
        said = dict(re.findall(r"^said (\w+): (.*)$", process.out, re.MULTILINE))
        for name, expected in EXPECTED.items():
            assert re.search(expected, said[name]), (name, said[name])
        assert said.keys() == {*EXPECTED, "end"} and said["end"].startswith("2 ")
    assert ended[0].out.splitlines()[-1] == ended[1].out.splitlines()[-1]
