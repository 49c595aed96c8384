"""Full and read-only disks: a clear error, the run as it was, the steps before it readable, the next save works.

A small disk of its own fails below Orbax, in TensorStore's own writes too, and root is not spared.
"""

import errno
import re

import pytest

import jaxshard as js
from jaxshard.checkpoint import writer
from jaxshard.checkpoint.checksums import find_damage
from jaxshard.checkpoint.folder import step_folders
from jaxshard.checkpoint.lock import LOCK
from jaxshard.commands.main import main
from tests.checkpoint import small
from tests.checkpoint.runs import assert_same
from tests.checkpoint.small import BATCH, at, layout, new_run
from tests.small_disk import small_disk

PAGE = 4096


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 100 * PAGE) as made:
        yield made


@pytest.fixture
def step():
    return small.step()


def assert_nothing_but(root, steps):
    """These steps, intact, and not a file besides."""
    assert list(step_folders(root)) == steps == sorted(int(path.name) for path in root.iterdir() if path.name != LOCK)
    assert all(find_damage(path) == [] for path in step_folders(root).values())


def save_with(disk, free, root, number):
    """Saves with so many free bytes; whether that went well. If not, only what was there before is there."""
    disk.leave(free)
    try:
        js.save(root, at(number), layout())
    except OSError as error:
        message = rf"{re.escape(str(root / str(number)))}: this step could not be saved, .*stay as they are: .*\S"
        assert re.match(message, str(error)) and "No space left on device" in str(error), error
        assert error.errno == errno.ENOSPC, "below TensorStore too"
        saved = False
    else:
        saved = True
    disk.empty()
    return saved


def sweep(disk, step_of_pages):
    """A save at every number of free pages, from none to enough; at how many of them it went well."""
    root, outcomes = disk.folder, []
    js.save(root, at(1), layout())
    expected = js.restore(root, layout(), step=1)
    for pages in range(0, 64, step_of_pages):
        outcomes.append(save_with(disk, pages * PAGE, root, 2))
        assert_nothing_but(root, [1, 2] if outcomes[-1] else [1])
        if outcomes[-1]:
            writer.delete_step(root / "2")
    assert_same(js.restore(root, layout()), expected)
    js.save(root, at(2), layout())
    assert_nothing_but(root, [1, 2])
    return outcomes


@pytest.mark.parametrize(("pages", "fewest"), [(9, 3), pytest.param(1, 20, marks=pytest.mark.slow)])
def test_a_disk_that_fills_up_anywhere_in_a_save(pages, fewest, disk):
    outcomes = sweep(disk, pages)
    assert outcomes == sorted(outcomes) and fewest <= outcomes.count(False) < len(outcomes)


def losses_of(step, count, on_run):
    losses = []
    js.fit(
        new_run(),
        step,
        [BATCH] * count,
        steps=count,
        callbacks=[lambda one: losses.append(one.metrics["loss"])],
        on_run=on_run,
    )
    return losses


def lenient(checkpointer, errors):
    """What a training loop does that would rather go on than stop."""

    def save(number, run):
        try:
            checkpointer(number, run)
        except OSError as error:
            errors.append(str(error))

    return save


def test_training_goes_on_over_a_full_disk(disk, step):
    """Losses bit-equal to those of a run that was never saved; failures of the background come with the next call."""
    errors = []
    checkpointer = js.Checkpointer(disk.folder, layout(), every=1)

    def weather(number, run):
        if number == 3:
            checkpointer.wait_until_finished()
            disk.leave(3 * PAGE)
        if number == 6:
            with pytest.raises(OSError, match=r"/5: this step could not be saved"):
                checkpointer.wait_until_finished()
            disk.empty()

    losses = losses_of(step, 7, [weather, lenient(checkpointer, errors)])
    checkpointer.wait_until_finished()
    assert losses == losses_of(step, 7, [])
    # Step 4 was not begun: it is where the failure of step 3 was told. That of step 5 was told to `weather`.
    assert len(errors) == 1 and "/3: this step could not be saved" in errors[0] and "No space left" in errors[0]
    assert_nothing_but(disk.folder, [1, 2, 6, 7])


def test_a_read_only_disk(disk):
    """Nothing is written, everything is read: restoring, verifying and listing need no permission to write."""
    root = disk.folder
    saved = {number: js.save(root, at(number), layout()) for number in (1, 2)}
    run = at(3)
    with disk.read_only():
        with pytest.raises(OSError, match=r"run/3: this step could not be saved, .*Read-only file system"):
            js.save(root, run, layout())
        with pytest.raises(OSError, match="checkpoints can't be saved here: Read-only file system"):
            js.Checkpointer(root, layout(), every=1)
        assert js.save(root, at(2), layout()) == saved[2]  # it is there already
        assert js.latest_step(root, intact=True) == 2
        assert_same(js.restore(root, layout()), at(2))
        assert main(["checkpoint", "verify", str(root)]) == 0
    js.save(root, run, layout())
    assert_nothing_but(root, [1, 2, 3])
