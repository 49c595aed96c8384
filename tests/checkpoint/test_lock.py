"""One training at a time saves into a folder: the second is refused by the name of the first; dead ones hold none."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest

import jaxshard as js
from jaxshard.checkpoint import lock
from jaxshard.checkpoint.lock import LOCK, check_free, hold, release
from jaxshard.commands.saving import Saving
from tests.checkpoint.small import at, layout

HOLD = "import sys, pathlib; from jaxshard.checkpoint.lock import hold; hold(pathlib.Path(sys.argv[1])); "


@contextmanager
def another_training(root, then="print('held', flush=True); input()"):
    """A process that has the lock of a folder."""
    command = [sys.executable, "-c", HOLD + then, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_training_is_refused_by_the_name_of_the_first_and_a_kill_leaves_no_lock(tmp_path):
    js.save(tmp_path, at(1), layout())
    with another_training(tmp_path) as process:
        named = rf"-c \(process {process.pid} on host {socket.gethostname()}, since .*\) is training into this folder"
        for refused in (
            lambda: js.Checkpointer(tmp_path, layout(), every=1),
            lambda: Saving(tmp_path).begin(layout(), {}),
            lambda: js.save(tmp_path, at(2), layout()),
        ):
            with pytest.raises(BlockingIOError, match=named):
                refused()
        assert int(js.restore(tmp_path, layout()).step) == js.latest_step(tmp_path, intact=True) == 1  # who reads may
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, "1"], "the file means nothing by itself"
    js.save(tmp_path, at(2), layout())
    with js.Checkpointer(tmp_path, layout(), every=1) as checkpointer:
        checkpointer(3, at(3))
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


def test_the_lock_is_free_again_after_the_last_checkpointer_of_a_process(tmp_path):
    """A cell of a notebook that runs again makes another one; two in one process are its own affair."""
    first, second = (js.Checkpointer(tmp_path, layout(), every=1) for _ in range(2))
    check_free(tmp_path)
    for checkpointer in (first, second):
        assert (tmp_path / LOCK).exists()
        with checkpointer:
            checkpointer(1, at(1))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    with another_training(tmp_path), pytest.raises(BlockingIOError):
        hold(tmp_path)


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    """Loaders of data fork, and outlive a parent that was killed."""
    program = """
    import os, time
    if os.fork() == 0:
        os.close(0), time.sleep(100)
    print("held", flush=True)
    input()
    """
    then = "exec(" + repr(textwrap.dedent(program)) + ")"
    command = [sys.executable, "-c", HOLD + then, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(BlockingIOError):
                hold(tmp_path)
            process.kill()
            process.wait()
            hold(tmp_path)
            release(tmp_path)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_lock_is_not_touched(kind, tmp_path):
    root, target = tmp_path / "run", tmp_path / "precious"
    root.mkdir()
    target.write_text("as it was")
    match kind:
        case "link":
            (root / LOCK).symlink_to(target)
        case "pipe":
            os.mkfifo(root / LOCK)
        case "folder":
            (root / LOCK).mkdir()
    with pytest.raises(OSError, match=r"run/\.lock: checkpoints can't be saved here"):
        js.Checkpointer(root, layout(), every=1)
    assert target.read_text() == "as it was" and [path.name for path in root.iterdir()] == [LOCK]


def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match=r"no locks \(.*No locks available\); see to it that one training alone"):
        checkpointer = js.Checkpointer(tmp_path, layout(), every=1)
    with checkpointer:
        checkpointer(1, at(1))
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
