"""A bit that flips in one of two real processes: both name the array, the device and its process, in `js.fit` too."""

import re

import pytest

from tests.distributed.launched import processes

PROGRAM = """
    from tests.checks.flips import flipped
    from jaxshard.hlo.found import collectives
    from jaxshard.checks.replicas import BitSums, list_watched

    layout = made(js.ddp("data"))
    run = js.init(init_fn, tx, layout, 0)
    js.check_replicas(run, layout)
    victim = jax.devices()[6]
    try:
        js.check_replicas(flipped(run, "params/w", device=victim.id, element=77, bit=3), layout)
    except js.ReplicasDiffer as error:
        print("said", [(d.leaf.path, [x == victim for x in d.differ]) for d in error.differences], error, flush=True)

    sums = BitSums(layout.mesh, list_watched(layout))
    found = collectives(sums.program, layout.mesh), collectives(sums.gather, layout.mesh)
    print("moves", [[(c.kind, c.axes, c.count, c.sizes) for c in each] for each in found], flush=True)

    step = js.make_step(loss_fn, tx, layout)
    def wrong_at_three(run, rows):
        run, metrics = step(run, rows)
        return (flipped(run, "params/b", device=0, element=5, bit=30) if run.step == 3 else run), metrics
    watch = js.ReplicaWatch(layout, every=2)
    try:
        js.fit(run, wrong_at_three, js.batches(Ones(), layout), steps=8, on_run=[watch])
    except js.ReplicasDiffer as error:
        print("fit", error.step, error.clean, [x.id for x in error.differences[0].differ], flush=True)
"""


@pytest.mark.slow
def test_both_processes_name_the_array_and_the_device():
    ended = processes(PROGRAM)
    assert [one.status for one in ended] == [0, 0], ended[0].err[-3000:] + ended[1].err[-3000:]
    for one in ended:
        assert "said [('params/w', [True])] after step 0 copies of arrays that must be equal differ" in one.out
        assert re.search(r"params/w float32\[64, 512\], 8 copies: device \d+ of process 1 \(host .*\) differs", one.out)
        assert "moves [[], [('all-gather', ('data',), 1, (128,))]]" in one.out  # 4 arrays, 8 devices, 4 bytes
        assert "fit 4 2 [0]" in one.out
