"""Processes that were killed go on from memory: with the same losses, and without a checkpoint."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.killing import _lines, _new_children, _until, alive, finished, launch, losses, process_index
from tests.distributed.launched import processes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")

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


def train(tmp_path, steps):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(300)))
    command = [sys.executable, "-m", "jaxshard", "train", "--data", text, "--devices", 4, "--seq", 16, "--batch", 8]
    command += ["--mesh", "replica=2,data=2", "--strategy", "hsdp", "--change", "depth=2,width=16,heads=2"]
    return [*command, "--steps", steps, "--eval-every", steps, "--sample", 0]


def killed(tmp_path, victims, steps):
    """Four processes of which one after another is killed, beside a run that is not disturbed."""
    command, log, rng = train(tmp_path, steps), tmp_path / "run.log", random.Random(0)
    flags = ["--memory-every", 1, "--log", log, "--json", tmp_path / "run.json"]
    program, seen = launch(*command, *flags, count=4, restarts=len(victims)), set()
    for victim in victims:
        pids = _until(program, lambda seen=seen: _new_children(program, seen, 4))
        seen = seen | pids
        lines = _lines(log) + rng.randint(2, 5)
        _until(program, lambda lines=lines: _lines(log) >= lines)
        time.sleep(rng.uniform(0.0, 0.2))
        os.kill({process_index(pid): pid for pid in pids}[victim], signal.SIGKILL)
        _until(program, lambda pids=pids: not any(map(alive, pids)))
    output = finished(program)
    assert output.count("was ended by SIGKILL; ending the others") == len(victims)
    assert output.count("; goes on from step ") == len(victims)
    finished(launch(*command, "--log", tmp_path / "whole.log", "--json", tmp_path / "whole.json", count=4))
    taken, reference = losses(log), dict(losses(tmp_path / "whole.log"))
    assert all(loss == reference[step] for step, loss in taken)
    missing = set(reference) - {step for step, _ in taken}  # process 0 was killed before it wrote the line
    again = len(taken) - len(reference) + len(missing)
    assert len(missing) <= victims.count(0) and again <= len(victims), (missing, again)
    mine, expected = (json.loads((tmp_path / name).read_text()) for name in ("run.json", "whole.json"))
    assert mine["loss_eval"] == expected["loss_eval"]
    memory = next(line.split()[2] for line in output.splitlines() if line.startswith("[0]   memory "))
    assert not Path(memory.rstrip(",")).exists(), "the launcher removes it at the end"


@pytest.mark.slow
def test_a_kill_of_process_0_changes_nothing(tmp_path):
    killed(tmp_path, [0], 12)


@pytest.mark.slow(sampled=False)  # many minutes; benchmarks/restarts.py shows twenty
def test_four_kills_change_nothing(tmp_path):
    killed(tmp_path, [0, 3, 1, 2], 32)
