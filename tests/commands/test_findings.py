"""What `jaxshard doctor` finds in seeded bad environments, and that a good one has no finding."""

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from jaxshard.commands.findings import (
    judge_hosts,
    judge_leftovers,
    judge_libtpu,
    judge_machine,
    judge_packages,
    judge_settings,
    users_of,
)
from jaxshard.commands.machine import Machine, read_machine
from jaxshard.distributed.hosts import Host

GOOD = Machine(
    cores=8, memory=2**34, available=2**33, shared=2**33, open_files=65536, interfaces=("lo", "eth0"),
    own_name_is_loopback=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "level", "what", "remedy"),
    [
        ({"JAX_PLATFORMS": "cuda,gpuu"}, "broken", "JAX has no platform 'gpuu'", "set it to cpu, cuda or tpu"),
        ({"JAX_PLATFORMS": "cpu"}, "warning", "JAX_PLATFORMS=cpu hides the accelerator", "unset JAX_PLATFORMS"),
        ({"XLA_FLAGS": "--xla_tpu_x=1"}, "broken", "--xla_tpu_x=1, which only libtpu knows", "LIBTPU_INIT_ARGS"),
        ({"XLA_FLAGS": "xla_dump_to=x"}, "broken", "'xla_dump_to=x', which is no flag", "begin each with --"),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "4"},
            "broken", "JAX_NUM_CPU_DEVICES=4 beside --xla_force_host_platform_device_count", "unset one",
        ),
        ({"GLOO_SOCKET_IFNAME": "eth7"}, "broken", "GLOO_SOCKET_IFNAME=eth7: there is no such", "use lo, eth0"),
        ({"NCCL_SOCKET_IFNAME": "=ib0"}, "broken", "NCCL_SOCKET_IFNAME==ib0: there is no such", "use lo, eth0"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "90"}, "broken", "MEM_FRACTION=90 is no fraction", "set it to 0.75"),
    ],
)  # fmt: skip
def test_a_bad_setting_is_found_with_its_remedy(environ, level, what, remedy):
    (finding,) = judge_settings(environ, ("lo", "eth0"), has_accelerator=True)
    assert finding.level == level and what in finding.what and remedy in finding.remedy


def test_good_settings_have_no_finding():
    environ = {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": "--xla_dump_to=x", "GLOO_SOCKET_IFNAME": "eth"}
    assert not [*judge_settings(environ, ("lo", "eth0"), has_accelerator=True)]
    assert not [*judge_settings({"JAX_PLATFORMS": "cpu"}, (), has_accelerator=False)]


def test_packages_that_disturb_each_other(tmp_path):
    old = {"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.9.0"}
    (finding,) = judge_packages(old.get, {})
    assert "jax-cuda12-plugin 0.9.0 beside jaxlib 0.10.2" in finding.what
    assert finding.remedy == 'pip install "jax-cuda12-plugin==0.10.2"'
    both = {"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2", "jax-cuda13-plugin": "0.10.2"}
    (finding,) = judge_packages(both.get, {})
    assert "both installed" in finding.what and finding.remedy == "pip uninstall jax-cuda12-plugin"
    (tmp_path / "libcudnn.so.9").touch()
    good = {"jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.2"}
    (finding,) = judge_packages(good.get, {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})
    assert finding.level == "warning" and str(tmp_path) in finding.what and finding.remedy == "unset LD_LIBRARY_PATH"
    assert not [*judge_packages(good.get, {"LD_LIBRARY_PATH": "/nowhere"})]
    assert not [*judge_packages({}.get, {"LD_LIBRARY_PATH": str(tmp_path)})]


@pytest.mark.parametrize(
    ("changes", "what", "remedy"),
    [
        ({"shared": 64 * 2**20}, "/dev/shm has 67.11 MB", "--shm-size"),
        ({"open_files": 256}, "may open 256 files", "ulimit -n"),
        ({"own_name_is_loopback": True}, "an address 127.x", "GLOO_SOCKET_IFNAME"),
        ({"available": 2**28}, "268.44 MB of the host's 17.18 GB are free", "end what holds the memory"),
    ],
)
def test_a_host_that_is_too_small_or_unreachable(changes, what, remedy):
    (finding,) = judge_machine(GOOD._replace(**changes), processes=2, has_gpu=False)
    assert finding.level == "warning" and what in finding.what and remedy in finding.remedy


def test_a_good_host_has_no_finding_and_one_process_needs_no_others():
    assert not [*judge_machine(GOOD, processes=2, has_gpu=True)]
    assert not [*judge_machine(GOOD._replace(shared=1, own_name_is_loopback=True), processes=1, has_gpu=False)]


def test_memory_of_a_launch_that_was_killed(tmp_path):
    (finding,) = judge_leftovers({tmp_path / "jaxshard-memory-x": 12_600_000})
    assert finding.level == "warning" and "jaxshard-memory-x holds 12.60 MB" in finding.what
    assert finding.remedy.startswith("delete it")


def test_this_host_can_be_read():
    machine = read_machine()
    assert machine.cores >= 1 and 0 < (machine.available or 1) <= (machine.memory or 1)


def test_hosts_that_do_not_reach_each_other_or_live_in_another_time():
    hosts = [Host(0, "a", "10.0.0.1", 0.0, (1,), {}), Host(1, "b", "10.0.0.2", -90.0, (), {})]
    network, clock = judge_hosts(hosts)
    assert network.level == "broken" and network.what == "process 0 on a reaches no port of process 1 on b"
    assert clock.what == "the clock of process 1 on b is -90.0 s off that of process 0" and "NTP" in clock.remedy


def test_two_users_of_libtpu(tmp_path):
    lock = tmp_path / "lock"
    assert not [*judge_libtpu({}, lock, [])]
    lock.touch()
    assert not [*judge_libtpu({}, lock, [])]
    code = (
        f"import fcntl, sys; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        (finding,) = judge_libtpu({}, lock, [])
        assert "holds" in finding.what and "ALLOW_MULTIPLE_LIBTPU_LOAD=1" in finding.remedy
        assert not [*judge_libtpu({"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}, lock, [])]
        if Path("/proc/self/fd").exists():
            assert users_of(lock) == [other.pid]
            (_, chips) = judge_libtpu({}, lock, [lock])
            assert chips.what == f"the TPU chips are in use by process {other.pid}"
        other.stdin.close()
    with lock.open("w") as own:
        fcntl.flock(own, fcntl.LOCK_SH)
        assert [*judge_libtpu({}, lock, [])]  # whoever it is
