"""The memory of a machine that is gone, or of which bits flipped, comes from its replicas on other machines."""

import pytest

from tests.distributed.launched import processes

KEPT = """
    from jaxshard.checkpoint.memory.checkpointer import MemoryCheckpointer
    from jaxshard.checkpoint.memory.segment import open_segment
    from jax.experimental import multihost_utils

    folder = f"{sys.argv[1]}/machine-{index // 2}"
    mesh = js.make_mesh(replica=2, data=4)
    layout = made(js.hsdp("replica", "data", min_size=0), mesh)
    step = js.make_step(loss_fn, tx, layout)
    memory = MemoryCheckpointer(layout, dir=folder, data=lambda: index)
    run = js.init(init_fn, tx, layout, 0)
    run = js.fit(run, step, [batch(8)] * 3, steps=3, on_run=[memory])
    expected = [np.asarray(shard.data) for shard in run.params["w"].addressable_shards]

    def restored(layout=layout):
        multihost_utils.sync_global_devices("before")
        found, data = MemoryCheckpointer(layout, dir=folder).restore()
        there = [np.asarray(shard.data) for shard in found.params["w"].addressable_shards]
        same = all((a == b).all() for a, b in zip(there, expected, strict=True))
        print("restored", int(found.step), data, same, flush=True)

    def flipped(process):
        if index == process:
            segment = open_segment(memory._segment.file)
            slot = next(slot for slot in (0, 1) if (record := segment.record(slot)) and record.step == 3)
            number = next(number for name, number in segment._names.items() if " params/w[" in name)
            segment._slot(slot)[segment._places[number]] ^= 1
        multihost_utils.sync_global_devices("flipped")

    if index < 2:  # the memory of the first machine is gone
        memory._segment.file.unlink()
    restored()
    flipped(3)
    restored()
    flipped(1), flipped(3)  # both copies of the same shards
    restored()
    try:
        fsdp = made(js.fsdp("data"), js.make_mesh(data=8))
        MemoryCheckpointer(fsdp, dir=folder)
    except ValueError as error:
        print("refused", " ".join(str(error).split()), flush=True)
"""


@pytest.mark.slow
def test_the_memory_of_a_machine_comes_from_its_replica(tmp_path):
    """Two machines of two processes each, which share no memory."""
    ended = processes(KEPT, str(tmp_path), count=4)
    for index, one in enumerate(ended):
        assert one.status == 0, [other.err[-1500:] for other in ended]
        first, second, third, refused = [line for line in one.out.splitlines() if line.startswith(("rest", "refu"))]
        assert first == "restored 3 2 True" if index < 2 else first.endswith("True"), one.out
        assert second.startswith("restored 3 ") and second.endswith("True")
        assert third.startswith("restored 2 "), "no copy of a shard of step 3 is left"
        assert "this is the memory of another run" in refused and "mesh: replica=2, data=4 there" in refused
    assert "process-3: step 3: other bytes than were written" in ended[3].err
