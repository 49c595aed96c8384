"""`js.MemoryCheckpointer` in one process: a run comes back bit for bit, and what is not its own is refused by name."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard as js
from jaxshard.checkpoint.memory.checkpointer import MemoryCheckpointer
from tests.checkpoint import small
from tests.checkpoint.runs import assert_same, made
from tests.optim.owners.shampoo import shampoo


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp", "three"])
def test_a_run_comes_back_as_it_was(name, tmp_path):
    mine = made(name)
    assert MemoryCheckpointer(mine.layout, dir=tmp_path).restore() is None
    memory = MemoryCheckpointer(mine.layout, dir=tmp_path, data=lambda: {"epoch": 1})
    memory(3, mine.run())
    run, data = MemoryCheckpointer(mine.layout, dir=tmp_path).restore()
    assert_same(run, mine.run())
    assert data == {"epoch": 1}


def test_a_training_goes_on_from_the_newest_step(tmp_path):
    layout, batches = small.layout(), [small.BATCH] * 9
    step = small.step()
    whole = js.fit(small.new_run(), step, batches, steps=6)

    def train(steps):
        memory = MemoryCheckpointer(layout, dir=tmp_path, every=2)
        found = memory.restore()
        run = small.new_run() if found is None else found[0]
        begin = int(run.step)
        return begin, js.fit(run, step, batches[begin:], steps=steps, on_run=[memory])

    assert train(3)[0] == 0
    begin, run = train(5)
    assert begin == 2 and int(run.step) == 5
    begin, run = train(6)
    assert begin == 4
    assert_same(run, whole)


def held(memory):
    """The steps in memory, with how often the run was saved until then."""
    return sorted((one.step, one.saves) for one in map(memory._segment.record, (0, 1)) if one)


def test_steps_that_are_taken_again_replace_those_that_were_given_up(tmp_path):
    memory = MemoryCheckpointer(small.layout(), dir=tmp_path)
    first = small.at(1)
    for run in (first, small.at(2), small.at(3)):
        memory.save(run)
        memory.save(run)  # the same one: no copy
    assert held(memory) == [(2, 2), (3, 3)]
    memory.save(small.at(3))  # back from 2 to 3
    assert held(memory) == [(2, 2), (3, 4)]
    memory.save(small.at(2))  # from 1 to 2: neither is of this training any more
    assert held(memory) == [(2, 5)]
    memory.save(small.at(3))
    assert held(memory) == [(2, 5), (3, 6)]
    memory.save(first)
    assert held(memory) == [(1, 7)]
    assert MemoryCheckpointer(small.layout(), dir=tmp_path).restore()[0].step == 1


def test_a_run_that_is_spoiled_is_not_copied(tmp_path):
    def spoiled(step):
        run = small.at(step)
        return run._replace(params=run.params | {"w": run.params["w"] * jnp.nan})

    memory = MemoryCheckpointer(small.layout(), dir=tmp_path)
    for run in (small.at(1), spoiled(2), spoiled(3)):
        memory.save(run)
    assert held(memory) == [(1, 1)]
    memory = MemoryCheckpointer(small.layout(), dir=tmp_path)
    assert memory.restore()[0].step == 1
    memory.save(spoiled(2))
    memory.save(small.at(2))
    assert held(memory) == [(1, 1), (2, 2)]
    memory = MemoryCheckpointer(small.layout(), dir=tmp_path / "other")
    memory.save(spoiled(1))  # as it began: no number of it became infinite
    memory.save(spoiled(2))
    assert held(memory) == [(1, 1), (2, 2)]


def test_matrices_that_live_with_owners_come_back_to_them(tmp_path):
    def layout():
        return js.layout(js.fsdp(min_size=0), mesh, lambda key: {"w": jnp.ones((8, 8)), "v": jnp.eye(8)}, shampoo(0.1))

    mesh = js.make_mesh(jax.devices()[:2], data=2)
    run = js.init(lambda key: {"w": jnp.ones((8, 8)), "v": jnp.eye(8)}, shampoo(0.1), layout(), 0)
    MemoryCheckpointer(layout(), dir=tmp_path).save(run)
    found, _ = MemoryCheckpointer(layout(), dir=tmp_path).restore()
    assert_same(found, run)
    assert found.opt_state.left["v"].shape == (2, 8, 8) and layout().owners.owner_of("w") == (1,)
    with pytest.raises(
        ValueError, match=r"delete the folder, or give each run its own\n  - opt_state/left/v: float32\["
    ):
        MemoryCheckpointer(layout().without_owners, dir=tmp_path)


def flip_last(segment, slot):
    """Flip a bit in the last block of a slot that holds any."""
    content = segment._slot(slot)
    content[np.flatnonzero(content)[-1]] ^= 1


def test_a_damaged_step_is_passed_over(tmp_path, capfd):
    memory = MemoryCheckpointer(small.layout(), dir=tmp_path)
    for step in (1, 2, 3):
        memory.save(small.at(step))
    flip_last(memory._segment, 1)
    assert memory.restore()[0].step == 2
    line = "process-0: step 3: other bytes than were written, of "
    assert line in (err := capfd.readouterr().err) and "goes on without them from step 2" in err
    memory.save(small.at(3))
    for slot in (0, 1):
        flip_last(memory._segment, slot)
    with pytest.raises(js.Damaged, match="no step is complete in memory") as caught:
        MemoryCheckpointer(small.layout(), dir=tmp_path).restore()
    assert "\n  - step 3: " in str(caught.value) and "\n  - step 2: " in str(caught.value)


def test_the_memory_of_another_run_is_refused_by_name(tmp_path):
    memory = MemoryCheckpointer(small.layout(), dir=tmp_path)
    memory.save(small.at(1))
    with pytest.raises(ValueError, match="process-0: this is the memory of another run") as caught:
        MemoryCheckpointer(made("hsdp").layout, dir=tmp_path)
    assert "mesh: data=2 there, replica=2, data=4 here" in str(caught.value)
    assert "params/w: float32[48, 24] over ('data', None) there, not in the layout" in str(caught.value)
    (tmp_path / "process-3").write_bytes((tmp_path / "process-0").read_bytes())
    with pytest.raises(ValueError, match=r"process-3: .*\n.*process: 0 of 1 there, 3 of 1 here"):
        MemoryCheckpointer(small.layout(), dir=tmp_path).restore()


def test_a_header_that_is_damaged_makes_the_segment_new(tmp_path, capfd):
    MemoryCheckpointer(small.layout(), dir=tmp_path).save(small.at(1))
    with (tmp_path / "process-0").open("r+b") as opened:
        opened.seek(50)
        opened.write(b"?")
    memory = MemoryCheckpointer(small.layout(), dir=tmp_path)
    assert "the checksum of its header does not fit its bytes; it is made anew" in capfd.readouterr().err
    assert memory.restore() is None


def test_there_has_to_be_a_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("JAXSHARD_MEMORY", raising=False)
    with pytest.raises(ValueError, match="start them with jaxshard launch --max-restarts N"):
        MemoryCheckpointer(small.layout())
    monkeypatch.setenv("JAXSHARD_MEMORY", str(tmp_path / "new"))
    assert MemoryCheckpointer(small.layout()).folder == tmp_path / "new"
    assert os.stat(tmp_path / "new").st_mode & 0o777 == 0o700
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        MemoryCheckpointer(small.layout(), every=0)
