"""Every test runs on eight simulated CPU devices, under a watchdog: one that hangs ends the run with all stacks.

The fast tier compiles without optimizing the code, in the processes that tests start too: its programs run for
milliseconds and compile for seconds. Partitioning, collectives and arguments stay the same. `pytest -m slow` compiles
as users do.
"""

import faulthandler
import gc
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # names of no models are not looked for in the network

# Processes that tests start import the package, too: compiled once for all of them, not in each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import jax
import pytest

from tests.storage.server import bucket as bucket

# Nor do all workers of all runs rewrite the asserts of 300 files of tests, which takes longer than to import the rest.
sys.dont_write_bytecode = False

# Tracing makes many small objects beside thousands of collected tests: to look for cycles at Python's own pace takes a
# tenth of the CPU time.
gc.set_threshold(100_000, 50, 100)

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

jax.config.update("jax_num_cpu_devices", 8)

SECONDS, SLOW_SECONDS = 300, 1200

# XLA's older code generator for fusions takes half the time. JAX 0.12 has it no longer: unknown flags end the process.
QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def pytest_configure(config: pytest.Config) -> None:
    """Sets JAX up for quick compilation where slow tests are left out, before anything is compiled."""
    if "not slow" not in config.option.markexpr:
        return
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__[:2] == (0, 10) and QUICK_FLAGS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {QUICK_FLAGS}".strip()


@pytest.fixture(scope="session")
def terminal(pytestconfig: pytest.Config) -> Iterator[int]:
    """Standard error as the run was started with: what a test writes to its own is lost when the process ends."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        number = os.dup(2)
    yield number
    os.close(number)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compilers' answers and other caches of tests out of the user's, and apart from those of other runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def compiled_quickly() -> Iterator[None]:
    """Compile without optimizing the code in the slow tier, too: for files of many small programs."""
    from tests.toys import quick_compile

    with quick_compile():
        yield


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest, terminal: int) -> Iterator[None]:
    """Ends the process, with the stack of every thread, if the test takes minutes: devices that wait for each other.

    pytest sets the same timer where `faulthandler_timeout` is given, and only there.
    """
    slow = request.node.get_closest_marker("slow")
    faulthandler.dump_traceback_later(SLOW_SECONDS if slow else SECONDS, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
