"""One training at a time saves into a folder of an object store; one that slept writes and deletes nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

import jaxshard as js
from jaxshard.checkpoint import lease, ownership
from jaxshard.checkpoint.folder import step_folders
from jaxshard.checkpoint.lease import LEASE, Lease, LeaseLost, is_dead, this_process
from jaxshard.checkpoint.manifest import MANIFEST, encode_manifest
from jaxshard.checkpoint.reader import describe
from jaxshard.storage.paths import ObjectPath, as_path
from tests.checkpoint.runs import assert_same
from tests.checkpoint.small import at, layout

HOLD = """
import sys
from jaxshard.checkpoint.lease import Lease
from jaxshard.storage.paths import ObjectPath, as_path
held = Lease(as_path(sys.argv[1]))
print("held", flush=True)
input()
"""


def elsewhere(root, **changes):
    """Take the lease as a training on another host would."""
    there = as_path(root) / LEASE
    before = json.loads(there.read().content or b'{"epoch": 0}')
    holder = replace(this_process(before["epoch"] + 1), host="another", name="train (process 7 on host other)")
    there.write_bytes(json.dumps(asdict(replace(holder, **changes))).encode())


@pytest.mark.slow
def test_a_second_training_is_refused_by_name_and_a_killed_one_is_followed_at_once(bucket):
    root = f"{bucket}/run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        for refused in (
            lambda: js.Checkpointer(root, layout(), every=1),
            lambda: js.save(root, at(1), layout()),
        ):
            with pytest.raises(BlockingIOError, match=rf"{root}: -c \(process {process.pid} on host .* is training"):
                refused()
        process.send_signal(signal.SIGKILL)
        process.wait()
    begun = time.monotonic()
    with js.Checkpointer(root, layout(), every=1) as checkpointer:
        checkpointer(1, at(1))
    assert time.monotonic() - begun < lease.EXPIRY / 2
    assert list(step_folders(as_path(root))) == [1]


def test_a_training_on_another_host_is_watched(bucket, monkeypatch, capsys):
    monkeypatch.setattr(lease, "EXPIRY", 0.6)
    monkeypatch.setattr(lease, "_POLL", 0.1)
    monkeypatch.setattr(lease, "_MARGIN", -60.0)
    root = f"{bucket}/run"
    elsewhere(root)
    held = Lease(as_path(root))  # nobody renews it
    assert held.epoch == 2 and "watching for 1 s whether it still does" in capsys.readouterr().err
    held.release()
    elsewhere(root)
    monkeypatch.setattr(lease.time, "sleep", lambda seconds: elsewhere(root))  # renewed meanwhile
    with pytest.raises(BlockingIOError, match="process 7 on host other"):
        Lease(as_path(root))
    elsewhere(root, is_held=False)
    Lease(as_path(root)).release()


@pytest.mark.parametrize("when", ["before", pytest.param("between", marks=pytest.mark.slow)])
def test_a_training_that_slept_writes_nothing(when, bucket, monkeypatch):
    root = f"{bucket}/run"
    with js.Checkpointer(root, layout(), every=1, keep=1) as checkpointer:
        checkpointer(1, at(1))
        checkpointer.wait_until_finished()
        if when == "before":
            elsewhere(root)
        else:  # after it was asked for the last time, and before the manifest is written
            checked = Lease.check

            def check(self):
                checked(self)
                if len(step_folders(as_path(root))) == 2 and not (as_path(root) / "2" / MANIFEST).exists():
                    elsewhere(root)

            monkeypatch.setattr(Lease, "check", check)
        with pytest.raises(LeaseLost, match="another training has taken this folder over, as this one slept") as caught:
            checkpointer(2, at(2))
            checkpointer.wait_until_finished()
        assert caught.value.exit_status == 75
        with pytest.raises(LeaseLost, match="nothing more is saved"):
            checkpointer(3, at(3))
    assert js.latest_step(root) == 1, "and step 1 is not deleted, although keep=1"
    assert_same(js.restore(root, layout()), at(1))


@pytest.mark.slow
def test_an_interrupted_save_is_deleted_by_the_next_holder_alone(bucket):
    root = as_path(f"{bucket}/run")
    js.save(str(root), at(1), layout())
    for name in (
        "2/arrays-7/state/d/1",
        "2/arrays-1/state/d/1",
        "1/arrays-6/state/d/1",
        "3/notes/text",
        "2/arrays-9/x",
    ):
        (root / name).write_bytes(b"data")
    (root / LEASE).write_bytes(json.dumps(asdict(replace(this_process(7), is_held=False))).encode())
    with js.Checkpointer(str(root), layout(), every=1):
        names = root.files()
        assert "2/arrays-1/state/d/1" not in names and "1/arrays-6/state/d/1" not in names
        assert {"3/notes/text", "2/arrays-9/x", "2/arrays-7/state/d/1"} <= set(names), "the last holder may be asleep"
    assert_same(js.restore(str(root), layout()), at(1))


def test_a_requeued_job_follows_itself_at_once():
    environ = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
    before = replace(this_process(3, environ | {"SLURM_RESTART_COUNT": "0"}), host="another")
    assert is_dead(before, environ)
    assert not is_dead(before, environ | {"SLURM_RESTART_COUNT": "0"})
    assert not is_dead(before, {"SLURM_JOB_ID": "13", "SLURM_RESTART_COUNT": "1"}) and not is_dead(before, {})
    assert not is_dead(this_process(3)) and is_dead(replace(this_process(3), process=(os.getpid(), 1)))


def test_a_renewal_whose_answer_never_came_is_one(bucket):
    held = Lease(as_path(f"{bucket}/run"))
    file = as_path(f"{bucket}/run") / LEASE
    file.write_bytes(json.dumps(json.loads(file.read_bytes()) | {"renewal": "lost"}).encode())
    held.check()
    held.release()
    assert json.loads(file.read_bytes())["is_held"] is False
    after = Lease(as_path(f"{bucket}/run"))
    assert after.epoch == held.epoch + 1
    after.release()


def test_a_lease_of_this_process_that_nobody_holds_is_taken_at_once_and_a_copied_one_is_none(bucket):
    left = Lease(as_path(f"{bucket}/run"))
    held = Lease(as_path(f"{bucket}/run"))
    assert held.epoch == left.epoch + 1
    content = (as_path(f"{bucket}/run") / LEASE).read_bytes()
    (as_path(f"{bucket}/copy") / LEASE).write_bytes(content.replace(b'"epoch": 2', b'"epoch": 5'))
    (as_path(f"{bucket}/copy/1/arrays-3/state") / "x").write_bytes(b"")
    copied = Lease(as_path(f"{bucket}/copy"))
    assert copied.epoch == 4
    for one in (left, held, copied):
        one.release()


def test_a_store_that_ignores_conditions_is_refused(bucket, monkeypatch):
    written = ObjectPath.write_bytes
    monkeypatch.setattr(ObjectPath, "replace", lambda self, content, _: written(self, content) or b"new")
    with pytest.raises(OSError, match=r"/run: this object store ignores the conditions of writes \(If-None-Match\)"):
        js.save(f"{bucket}/run", at(1), layout())


@pytest.mark.slow
def test_a_later_holder_keeps_what_an_earlier_one_would_take_back_or_delete(bucket):
    """The earlier one sleeps between its last question and what it does then."""
    root = as_path(f"{bucket}/run")
    with js.Checkpointer(str(root), layout(), every=1) as checkpointer:
        checkpointer(1, at(1))
    js.save(str(root), at(1), layout())  # a new holder finds the step: the manifest is written again
    assert describe(root).made["kept_by_epoch"] == 2
    with js.Checkpointer(str(root), layout(), every=1, keep=1) as checkpointer:
        elsewhere(str(root), epoch=9)
        (root / "2" / MANIFEST).write_bytes(
            encode_manifest(describe(root)._replace(step=2, epoch=9, files={}, generations={}))
        )
        with pytest.raises(LeaseLost):
            ownership.delete_objects(root / "2")
        with pytest.raises(LeaseLost):
            checkpointer(2, at(2))
            checkpointer.wait_until_finished()
    assert (root / "2" / MANIFEST).is_file() and js.latest_step(root) == 2


def test_a_lease_that_can_not_be_renewed_is_lost(bucket, monkeypatch):
    held = Lease(as_path(f"{bucket}/run"))
    monkeypatch.setattr(lease, "EXPIRY", 0.0)
    with pytest.raises(LeaseLost, match=r"could not be renewed for [0-9]+ s; nothing more is saved"):
        held.check_time()
    held.release()
