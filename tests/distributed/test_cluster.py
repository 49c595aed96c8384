"""Where `initialize` finds the other processes, and what it says where it can't."""

import sys
import warnings

import jax
import pytest

import jaxshard as js
from jaxshard.core.launch_environment import COORDINATOR, INDEX, LIMIT, PROCESSES
from jaxshard.distributed import cluster, hard_exit
from jaxshard.distributed.cluster import SILENCE

SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}  # fmt: skip
LAUNCHED = {COORDINATOR: "localhost:4711", PROCESSES: "4", INDEX: "3"}


@pytest.fixture
def joined(monkeypatch):
    """What JAX is asked for, in a process that has touched no device."""
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: asked.append(given))
    monkeypatch.setattr(cluster, "backend_is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "meet_all", lambda *place, bind, limit: asked.append((*place, bind, limit)))
    monkeypatch.setattr(cluster, "end_with_others", lambda links, silence: asked.append(silence))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return asked


@pytest.fixture
def environment(monkeypatch):
    def put(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def test_nothing_happens_alone(joined, environment):
    js.distributed.initialize()
    js.distributed.initialize("localhost:4711", 1, 0)
    environment(LAUNCHED | {PROCESSES: "1", INDEX: "0"})
    js.distributed.initialize()
    assert joined == [] and not isinstance(sys.excepthook, hard_exit.LeavingHook)


def test_one_task_of_slurm_keeps_all_its_devices(joined, environment):
    environment(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    js.distributed.initialize()
    assert joined == []


def test_a_pod_that_belongs_to_no_indexed_job_is_alone(joined, environment):
    environment({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        js.distributed.initialize()
    assert joined == []


def test_arguments_go_before_the_environment_and_that_before_the_cluster(joined, environment):
    environment(SLURM | {LIMIT: "700", SILENCE: "45.5"})
    js.distributed.initialize()
    environment(LAUNCHED | {LIMIT: "0.5", SILENCE: "20"})
    js.distributed.initialize()
    js.distributed.initialize("other:1", 3, 2, heartbeat_timeout=9, initialization_timeout=8)
    # All meet first, then JAX joins them, then each looks for failures of the others, and for hosts that are silent.
    met, given, watched = joined[::3], joined[1::3], joined[2::3]
    assert watched == [45.5, 20, 9]
    slurm = met[0][0]
    assert slurm.startswith("node07:")
    assert met == [
        (slurm, 2, 1, None, 700),
        ("localhost:4711", 4, 3, "localhost:4711", 1),
        ("other:1", 3, 2, None, 8),
    ]
    names = "coordinator_address", "num_processes", "process_id", "coordinator_bind_address"
    assert [tuple(one[name] for name in names) for one in given] == [place[:4] for place in met]
    assert [one["cluster_detection_method"] for one in given] == ["deactivate"] * 3
    # On Slurm JAX takes one GPU per task.
    assert [one["local_device_ids"] for one in given] == [[0], None, None]
    times = [(one["heartbeat_timeout_seconds"], one["initialization_timeout"]) for one in given]
    assert times == [(222, 700), (120, 1), (76, 8)], "JAX aborts after half of that at the earliest"
    assert isinstance(sys.excepthook, hard_exit.LeavingHook)


def test_the_devices_and_the_address_in_the_environment_go_before_those_of_the_cluster(joined, environment):
    environment(SLURM | {"SLURM_LOCALID": "1", "JAX_COORDINATOR_ADDRESS": "node09:5", "JAX_LOCAL_DEVICE_IDS": "0,1"})
    environment({"JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:5"})
    js.distributed.initialize()
    assert joined[0] == ("node09:5", 2, 1, "0.0.0.0:5", 300)
    assert joined[1]["local_device_ids"] is None  # JAX reads the variable itself


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_time_to_wait_that_is_none_is_refused(joined, environment, limit):
    environment(LAUNCHED | {LIMIT: limit})
    with pytest.raises(ValueError, match=f"{LIMIT}={limit} is not a positive number of seconds"):
        js.distributed.initialize()
    assert joined == []


@pytest.mark.parametrize("silence", ["0", "2.9", "-20", "nan", "inf", "long", ""])
def test_a_silence_that_is_too_short_is_refused(joined, environment, silence):
    environment(LAUNCHED | {SILENCE: silence})
    with pytest.raises(ValueError, match=f"{SILENCE}={silence} is not a number of seconds from 3 on"):
        js.distributed.initialize()
    with pytest.raises(ValueError, match="heartbeat_timeout=1 is not"):
        js.distributed.initialize(heartbeat_timeout=1)
    assert joined == []


@pytest.mark.parametrize(
    ("given", "variables", "message"),
    [
        (("host:1", 2), {}, "got coordinator_address=host:1, num_processes=2 without process_id; give all three"),
        (("host:1", 2), LAUNCHED, "without process_id"),
        ((), {PROCESSES: "2"}, f"without {COORDINATOR} and {INDEX}"),
        ((), LAUNCHED | {INDEX: "first"}, f"{INDEX}=first is not a whole number"),
        ((), LAUNCHED | {INDEX: "4"}, f"{INDEX}=4 is none of {PROCESSES}=4 processes"),
        (("host:1", 2, -1), {}, "process_id=-1 is not a whole number"),
        (("host", 2, 1), {}, "coordinator_address=host is not host:port"),
        ((":12", 2, 1), {}, "coordinator_address=:12 is not host:port"),
    ],
)
def test_half_an_answer_is_refused(joined, environment, given, variables, message):
    environment(variables)
    with pytest.raises(ValueError, match=message):
        js.distributed.initialize(*given)
    assert joined == []


def test_after_the_first_device_it_is_too_late():
    jax.devices()
    with pytest.raises(RuntimeError, match="JAX has touched a device already"):
        js.distributed.initialize("localhost:4711", 2, 0)


def test_a_second_call_joins_the_same_processes(joined, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster, "process_count_and_id", lambda: (2, 1))
    js.distributed.initialize()
    js.distributed.initialize("localhost:4711", 2, 1)
    with pytest.raises(RuntimeError, match="process 0 of 2 was asked for, but this is process 1 of 2 already"):
        js.distributed.initialize("localhost:4711", 2, 0)
    assert joined == []


def test_an_error_that_nobody_catches_leaves(monkeypatch, capsys):
    left = []
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(hard_exit, "leave", left.append)
    hard_exit.leave_on_error()
    once = sys.excepthook
    hard_exit.leave_on_error()
    assert sys.excepthook is once
    missing, differs = js.distributed.MissingProcess("late"), js.distributed.Disagreement("other")
    for error in (ValueError("wrong"), KeyboardInterrupt(), missing, differs):
        sys.excepthook(type(error), error, None)
    assert left == [1, 130, 75, 2] and "ValueError: wrong" in capsys.readouterr().err
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(ValueError, ValueError("at a prompt"), None)
    assert len(left) == 4
