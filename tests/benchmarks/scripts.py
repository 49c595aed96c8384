"""The programs in benchmarks/, as modules for one test."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name):
    """Make a fixture of a program there; what it imports from beside it is forgotten after the test, too."""

    @pytest.fixture
    def module(monkeypatch):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        before = set(sys.modules)
        yield importlib.import_module(name)
        for added in set(sys.modules) - before:
            if str(BENCHMARKS) in str(getattr(sys.modules[added], "__file__", "")):
                del sys.modules[added]

    return module
