"""Every test runs on eight simulated CPU devices, under a watchdog: one that hangs ends the run with all stacks."""

import faulthandler
import os
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import pytest

from tests.toys import quick_compile

jax.config.update("jax_num_cpu_devices", 8)

SECONDS, SLOW_SECONDS = 300, 1200


@pytest.fixture(scope="session")
def terminal(pytestconfig: pytest.Config) -> Iterator[int]:
    """Standard error as the run was started with: what a test writes to its own is lost when the process ends."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        number = os.dup(2)
    yield number
    os.close(number)


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest, terminal: int) -> Iterator[None]:
    """Ends the process, with the stack of every thread, if the test takes minutes: devices that wait for each other.

    pytest sets the same timer where `faulthandler_timeout` is given, and only there.
    """
    slow = request.node.get_closest_marker("slow")
    faulthandler.dump_traceback_later(SLOW_SECONDS if slow else SECONDS, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def compiling(request: pytest.FixtureRequest) -> Iterator[None]:
    """Slow tests compile as users do, the others without optimizations of the code."""
    if request.node.get_closest_marker("slow"):
        yield
    else:
        with quick_compile():
            yield
