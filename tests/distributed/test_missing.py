"""Real processes: one never starts, crashes at import or is late; several end together, with one status."""

import os
import re
import subprocess
import sys

import pytest

from tests.distributed.launched import free_address, processes

pytestmark = pytest.mark.slow

SCRIPT = ["-c", "import jaxshard as js; js.distributed.initialize(); import jax; print(jax.process_count())"]
CRASHES = ["-c", "import no_such_module; import jaxshard as js; js.distributed.initialize()"]


@pytest.fixture
def start():
    """Starts one of several processes, as a cluster would; none outlives the test."""
    started = []
    address = free_address()

    def one(program, index, count, limit):
        there = {"JAX_PLATFORMS": "cpu", "JAXSHARD_COORDINATOR_ADDRESS": address, "JAXSHARD_PROCESS_ID": str(index)}
        there |= {"JAXSHARD_NUM_PROCESSES": str(count), "JAXSHARD_INITIALIZATION_TIMEOUT": str(limit)}
        process = subprocess.Popen(
            [sys.executable, *program],
            env=os.environ | there,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield one
    for process in started:
        process.kill()
        process.communicate()


def ended(process):
    """(exit status, lines of standard error) of a process."""
    _, error = process.communicate(timeout=300)
    return process.returncode, error.strip().splitlines()


@pytest.mark.parametrize("crashed", [[], CRASHES])
def test_a_process_that_never_comes_is_named_and_ends_the_others_with_75(crashed, start):
    others = [start(SCRIPT, index, 3, 25) for index in (0, 2)]
    if crashed:
        assert ended(start(crashed, 1, 3, 25))[0] == 1
    (first, said), (second, said_second) = map(ended, others)
    assert (first, second) == (75, 75), (said, said_second)
    told = [re.search(r"waiting for process 1 of 3 since (\d+) s", line) for line in said]
    assert 1 <= sum(map(bool, told)) <= 2
    for lines in (said, said_second):
        assert "distributed.initialize: process 1 of 3 did not come within 25 s" in lines[-1]
        assert not any("@ " in line for line in lines), "a stack of C++"


DIFFER = """
    js.init(init_fn, tx, made(), index)
    time.sleep(60)
"""


@pytest.mark.parametrize("count", [2, 4])
def test_all_end_with_2_where_they_differ(count):
    for process in processes(DIFFER, count=count):
        assert process.status == 2 and re.search("Disagreement|because another one failed", process.err), process
        assert "coordination_service_agent" not in process.err and "Check failure stack" not in process.err


BUSY = """
    if index == int(sys.argv[1]):
        raise FileNotFoundError("no such data")
    time.sleep(100)
"""


@pytest.mark.parametrize("failing", ["0", "2"])
def test_those_that_are_busy_end_with_the_status_of_the_one_that_failed(failing):
    found = processes(BUSY, failing, count=4)
    assert [process.status for process in found] == [1] * 4
    for index, process in enumerate(found):
        if index != int(failing):
            assert "this process ends with status 1, because another one failed" in process.err
            assert f"process {failing} (host " in process.err and "FileNotFoundError: no such data" in process.err
