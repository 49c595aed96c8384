"""The folder in memory of a launch: made, removed at its end, and by the next launch where this one was killed."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxshard.checkpoint.memory import folder
from jaxshard.checkpoint.memory.folder import find_leftovers, memory_folder, size_of

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory of Linux")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "SHARED", tmp_path)
    monkeypatch.delenv("JAXSHARD_MEMORY", raising=False)
    return tmp_path


def test_it_is_there_for_one_launch(shared):
    with memory_folder() as environment:
        mine = Path(environment["JAXSHARD_MEMORY"])
        assert mine.parent == shared and mine.stat().st_mode & 0o777 == 0o700
        (mine / "process-0").write_bytes(bytes(100))
        assert find_leftovers() == [], "it is locked"
        with memory_folder() as other:
            assert other != environment and mine.exists()
    assert not list(shared.iterdir())


def test_a_folder_of_the_callers_own_is_left_alone(shared, monkeypatch):
    monkeypatch.setenv("JAXSHARD_MEMORY", str(shared / "mine"))
    (shared / "mine").mkdir()
    with memory_folder() as environment:
        assert environment == {}
    assert (shared / "mine").exists()
    with memory_folder(make=False) as environment:
        assert environment == {}


def test_what_a_launch_that_was_killed_left_is_removed_by_the_next(shared):
    program = f"""
        import os, signal
        from pathlib import Path
        from jaxshard.checkpoint.memory import folder
        folder.SHARED = Path({str(shared)!r})
        with folder.memory_folder() as environment:
            Path(environment["JAXSHARD_MEMORY"], "process-0").write_bytes(bytes(100))
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    (left,) = find_leftovers()
    assert size_of(left) >= 100
    with memory_folder():
        assert not left.exists()
    assert not list(shared.iterdir())


def test_nothing_is_made_where_no_memory_is_shared(monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "SHARED", tmp_path / "absent")
    monkeypatch.delenv("JAXSHARD_MEMORY", raising=False)
    with memory_folder() as environment:
        assert environment == {}
    assert find_leftovers() == []


def test_the_launcher_needs_no_jax():
    code = "import sys, jaxshard.commands.launch; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
