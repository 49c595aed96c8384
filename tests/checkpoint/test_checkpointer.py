"""Saving while a run goes on; full disks, missing permissions and kills leave the steps before."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

import jaxshard as js
from jaxshard.checkpoint import writer
from jaxshard.checkpoint.checksums import find_damage
from jaxshard.checkpoint.folder import step_folders
from jaxshard.checkpoint.lock import LOCK
from jaxshard.checkpoint.manifest import MANIFEST
from jaxshard.checkpoint.reader import describe
from jaxshard.commands.main import main
from jaxshard.training.judge import EVALUATIONS
from jaxshard.training.state import run_key
from tests.checkpoint import small
from tests.checkpoint.runs import assert_same
from tests.checkpoint.small import BATCH, at, layout, new_run


@pytest.fixture
def step():
    return small.step()


def steps_of(root):
    return list(step_folders(root))


def test_fit_saves_in_the_background_and_keeps_the_newest(step, tmp_path):
    runs = {}
    with js.Checkpointer(tmp_path, layout(), every=2, keep=2) as checkpointer:
        saved = [checkpointer, lambda number, run: runs.update({number: jax.tree.map(lambda x: x + 0, run.params)})]
        js.fit(new_run(), step, [BATCH] * 7, steps=7, on_run=saved)  # the last step, too
    assert steps_of(tmp_path) == [6, 7]
    for number in (6, 7):  # as it was then, although the steps after it were given the same arrays
        back = js.restore(tmp_path, layout(), step=number)
        assert int(back.step) == number and find_damage(tmp_path / str(number)) == []
        assert_same(back.params, runs[number])


def test_the_last_run_is_saved_where_training_stops_but_not_after_an_error(step, tmp_path):
    def fit(folder, start, **options):
        with js.Checkpointer(tmp_path / folder, layout(), every=4) as checkpointer:
            return js.fit(
                start, step, [BATCH] * 3, steps=5, on_run=[checkpointer, *options.pop("on_run", ())], **options
            )

    early = fit("early", new_run(), stop=lambda metrics: True)
    assert steps_of(tmp_path / "early") == [1]
    fit("early", early, on_run=[lambda number, run: number == 3])
    assert steps_of(tmp_path / "early") == [1, 3]
    with pytest.raises(ZeroDivisionError):
        fit("broken", new_run(), callbacks=[lambda record: 1 / (record.step - 2)])
    assert steps_of(tmp_path / "broken") == []


def fit_best(step, root, losses, run=None, mode="min", metric="loss", steps=None):
    """Training with an evaluation after every step; `steps` are those of `losses`, unless told otherwise."""
    left = iter(losses)
    run = new_run() if run is None else run
    with js.Checkpointer(root, layout(), every=100, best=metric, best_mode=mode, data=lambda: 7) as checkpointer:
        return js.fit(
            run, step, [BATCH] * 9, steps=int(run.step) + (len(losses) if steps is None else steps),
            on_run=[checkpointer],
            evaluate=lambda run: {"loss": next(left), "other": float("nan")}, eval_every=1,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "mode", "best"),
    [([np.nan, 2, 3, 2], "min", 2), ([np.inf, 1], "max", 2)],
)
def test_the_best_run_is_kept(losses, mode, best, step, tmp_path):
    last = fit_best(step, tmp_path, losses, mode=mode)
    assert steps_of(tmp_path / "best") == [best] and steps_of(tmp_path) == [len(losses)]
    data = describe(tmp_path / "best").data
    assert data == {"evaluation": {"loss": losses[best - 1], "other": None}, "position": 7}
    assert int(js.restore(tmp_path / "best", layout()).step) == best and int(last.step) == len(losses)


def test_the_best_run_is_known_to_the_next_process_unless_training_begins_again(step, tmp_path):
    run = fit_best(step, tmp_path, [3, 2, 2.5])
    copy = jax.tree.map(lambda x: x.copy(), run)
    fit_best(step, tmp_path, [2.2, 2.1], run)
    assert steps_of(tmp_path / "best") == [2]
    fit_best(step, tmp_path, [2.2, 1.9], copy)
    assert steps_of(tmp_path / "best") == [5]
    fit_best(step, tmp_path, [9, 8])
    assert steps_of(tmp_path / "best") == [2]


@pytest.mark.parametrize("killed", ["evaluating", "before the save", "saving", "deleting"])
def test_a_kill_around_the_save_of_the_best_run_does_not_lose_it(killed, step, tmp_path):
    """Step 1 has the loss 3, step 2 the loss 1, and step 3, after the restart, the loss 2."""
    best = tmp_path / "best"
    run = fit_best(step, tmp_path, [3])
    shutil.copytree(best / "1", tmp_path / "kept")
    fit_best(step, tmp_path, [1], run)
    shutil.move(tmp_path / "kept", best / "1")
    if killed == "saving":
        (best / "2" / MANIFEST).unlink()
    elif killed != "deleting":
        shutil.rmtree(best / "2")
    if killed == "evaluating":
        (tmp_path / EVALUATIONS).write_text('[[1, {"loss": 3}]]')
    fit_best(step, tmp_path, [1, 2] if killed == "evaluating" else [2], js.restore(tmp_path, layout()), steps=1)
    assert max(steps_of(best)) == int(js.restore(best, layout()).step) == 2
    assert describe(best).data["evaluation"]["loss"] == 1
    assert_same(js.restore(best, layout()), js.restore(tmp_path, layout(), step=2))
    assert main(["checkpoint", "verify", str(best)]) == 0 and steps_of(tmp_path) == [1, 2, 3]


def test_a_run_that_goes_on_from_an_earlier_step_keeps_the_best_until_it_is_evaluated(step, tmp_path):
    run = fit_best(step, tmp_path, [3])
    copy = js.clone(run)
    fit_best(step, tmp_path, [1], run)
    fit_best(step, tmp_path, [], copy)
    assert steps_of(tmp_path / "best") == [2]


def test_what_interrupted_saves_left_is_deleted_and_nothing_else(tmp_path, monkeypatch):
    for number in (1, 2):
        js.save(tmp_path, at(number), layout())
    (tmp_path / "2" / MANIFEST).rename(tmp_path / "2" / f"{MANIFEST}.draft")
    (tmp_path / "3").mkdir()
    js.save(tmp_path / "4", at(1), layout())  # another training, in a folder that is named by a number
    (tmp_path / "5").symlink_to(tmp_path / "2")
    slowly(monkeypatch)
    first = js.Checkpointer(tmp_path, layout(), every=1)
    first.save(at(6))
    with js.Checkpointer(tmp_path, layout(), every=1):  # as where a cell of a notebook runs again
        first.wait_until_finished()
    assert steps_of(tmp_path) == [1, 4, 5, 6] and steps_of(tmp_path / "4") == [1]
    assert find_damage(tmp_path / "6") == []


def test_the_best_of_a_metric_that_is_missing_is_refused(step, tmp_path):
    with pytest.raises(ValueError, match=r"best='accuracy' is no metric of the evaluation: \['loss', 'other'\]"):
        fit_best(step, tmp_path, [1], metric="accuracy")
    with pytest.raises(ValueError, match="best_mode must be"):
        fit_best(step, tmp_path, [1], mode="least")


def test_an_error_of_the_loop_comes_first_and_that_of_the_save_is_noted(tmp_path, monkeypatch):
    def broken(*args):
        raise OSError("gone")

    monkeypatch.setattr(writer, "write_manifest", broken)
    with pytest.raises(KeyError, match="loop") as caught, js.Checkpointer(tmp_path, layout(), every=1) as checkpointer:
        checkpointer(1, at(1))
        raise KeyError("loop")
    assert "this step could not be saved" in caught.value.__notes__[0]
    with pytest.raises(OSError, match="gone"), js.Checkpointer(tmp_path, layout(), every=1) as checkpointer:
        checkpointer(1, at(1))
    assert steps_of(tmp_path) == []


def test_keeping_never_deletes_what_was_just_saved(tmp_path):
    for number in (100, 200):
        js.save(tmp_path, at(number), layout())
    with js.Checkpointer(tmp_path, layout(), every=5, keep=1, data=lambda: {"epoch": 3}) as checkpointer:
        checkpointer(4, at(4))
        checkpointer(5, at(5))
    assert steps_of(tmp_path) == [5] and describe(tmp_path).data == {"epoch": 3}


def test_keeping_leaves_steps_that_lie_elsewhere(tmp_path):
    """Their folders are symbolic links: what they point to is neither deleted nor emptied, and it is said."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    js.save(elsewhere, at(1), layout())
    here.mkdir()
    (here / "1").symlink_to(elsewhere / "1")
    with pytest.warns(UserWarning, match="these steps are symbolic links, which keep=1 neither counts nor deletes: 1"):
        checkpointer = js.Checkpointer(here, layout(), every=1, keep=1)
    with checkpointer:
        checkpointer(2, at(2))
        checkpointer(3, at(3))
    assert steps_of(here) == [1, 3] and find_damage(elsewhere / "1") == find_damage(here / "1") == []


def test_a_damaged_step_that_lies_elsewhere_is_not_replaced(tmp_path):
    js.save(tmp_path / "elsewhere", at(1), layout())
    (tmp_path / "elsewhere" / "1" / MANIFEST).unlink()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "1").symlink_to(tmp_path / "elsewhere" / "1")
    there = sorted((tmp_path / "elsewhere").rglob("*"))
    with pytest.raises(OSError, match=r"here/1 is a symbolic link to .*elsewhere/1, where nothing is deleted"):
        js.save(tmp_path / "here", at(1), layout())
    assert sorted((tmp_path / "elsewhere").rglob("*")) == there


def test_sizes_are_checked(tmp_path):
    for name in ("every", "keep"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            js.Checkpointer(tmp_path, layout(), **({"every": 1} | {name: 0}))


def slowly(monkeypatch, fail=None):
    """Saves take half a second, and those of a step fail."""
    save = writer.store.save_arrays

    def slow(folder, *rest):
        time.sleep(0.5)
        if fail is not None and folder.parent.name == fail[0]:
            raise fail[1]
        save(folder, *rest)

    monkeypatch.setattr(writer.store, "save_arrays", slow)


def test_two_saves_of_one_step_at_a_time_are_one_after_the_other(tmp_path, monkeypatch):
    slowly(monkeypatch)
    with js.Checkpointer(tmp_path, layout(), every=1) as checkpointer:
        checkpointer(1, at(1))
        assert js.save(tmp_path, at(1), layout()) == tmp_path / "1"
        assert find_damage(tmp_path / "1") == []
        checkpointer(2, at(2))
        with pytest.raises(ValueError, match="step 2 of another run is there"):
            js.save(tmp_path, at(2)._replace(key=run_key(at(2).key)), layout())
    assert steps_of(tmp_path) == [1, 2] and find_damage(tmp_path / "2") == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [(MemoryError("no memory"), OSError), (PermissionError(errno.EPERM, "Operation not permitted"), PermissionError)],
    ids=["memory", "permission"],
)
def test_an_error_of_the_background_leaves_nothing_and_the_step_can_be_saved_again(error, kind, tmp_path, monkeypatch):
    with monkeypatch.context() as patches:
        slowly(patches, fail=("1", error))
        checkpointer = js.Checkpointer(tmp_path, layout(), every=1)
        checkpointer(1, at(1))
        with pytest.raises(kind, match="1: this step could not be saved") as caught:
            checkpointer.wait_until_finished()
    assert caught.value.__cause__ is (error if kind is OSError else None)
    assert caught.value.errno == getattr(error, "errno", None)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    checkpointer.save(at(1))
    checkpointer.wait_until_finished()
    assert js.latest_step(tmp_path, intact=True) == 1


def test_an_interrupted_save_leaves_nothing(tmp_path, monkeypatch):
    slowly(monkeypatch, fail=("1", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        js.save(tmp_path, at(1), layout())
    assert list(tmp_path.iterdir()) == []


def test_arrays_that_are_gone_or_are_none_are_named(tmp_path):
    gone = new_run()
    gone.params["w"].delete()
    with pytest.raises(ValueError, match=r"arrays of this run were donated to an earlier step, .*: params/w; "):
        js.save(tmp_path, gone, layout())
    with pytest.raises(ValueError, match=r"no arrays of JAX; .*\n  - step: int32$"):
        js.save(tmp_path, at(1)._replace(step=np.int32(1)), layout())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_program_that_ends_while_one_save_fails_finishes_the_other(tmp_path):
    program = """
        import jax, sys, time
        jax.config.update("jax_num_cpu_devices", 2)
        import jaxshard as js
        from jaxshard.checkpoint import writer
        from tests.checkpoint.small import at, layout
        save = writer.store.save_arrays
        def slow(folder, *rest):
            time.sleep(1)
            if folder.parent.parent.name == "bad":
                raise OSError("bad disk")
            save(folder, *rest)
        writer.store.save_arrays = slow
        for name in ("good", "bad"):
            js.Checkpointer(f"{sys.argv[1]}/{name}", layout(), every=1)(1, at(1))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, check=True, timeout=100, env=environment, capture_output=True, text=True)
    assert js.latest_step(tmp_path / "good", intact=True) == 1 and js.latest_step(tmp_path / "bad") is None
    lines = [line for line in ended.stderr.splitlines() if "bad" in line]
    assert len(lines) == 1 and lines[0].startswith("jaxshard: ") and "bad disk" in lines[0]
    assert "Traceback" not in ended.stderr
