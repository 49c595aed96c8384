"""The writer for Weights & Biases: its calls of the package, and the package itself, offline."""

import math
import sys
from types import SimpleNamespace

import pytest

from jaxshard.training import metrics
from jaxshard.training.metrics import weights_and_biases
from tests.training.metrics.records import RECORDS, record


class Run:
    def __init__(self, id):
        self.id, self.rows, self.config, self.exits = id, [], {}, []

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "step")

    def log(self, row):
        self.rows.append(row)

    def finish(self, exit_code):
        self.exits.append(exit_code)


class Config(dict):
    def update(self, config, allow_val_change):
        assert allow_val_change
        super().update(config)


class Errors:
    class UsageError(Exception):
        pass

    class AuthenticationError(Exception):
        pass


@pytest.fixture
def package(monkeypatch):
    """The part of the package that is used; `calls` has the arguments of `init`, `runs` what it returned."""
    found = SimpleNamespace(calls=[], runs=[], problem=None, errors=Errors, mode="offline", url="http://127.0.0.1:1")
    found.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode=found.mode, base_url=found.url))
    found.Settings = SimpleNamespace

    def init(**arguments):
        found.calls.append(arguments)
        if found.problem is not None:
            raise found.problem
        found.runs.append(Run(arguments["id"] or f"drawn{len(found.runs)}"))
        found.runs[-1].config = Config()
        return found.runs[-1]

    found.init = init
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match='needs wandb: pip install "wandb'):
        metrics.wandb("project")


def test_every_number_and_the_configuration_are_written(package):
    write = metrics.wandb("project", config={"lr": 0.5}, name="first")
    for one in RECORDS:
        write(one)
    write.finish(None)
    (run,) = package.runs
    assert run.rows[0] == metrics.flat(RECORDS[0]) and math.isnan(run.rows[1]["loss"])
    assert run.config == {"lr": 0.5} and run.exits == [0]
    assert package.calls[0]["project"] == "project" and package.calls[0]["name"] == "first"


def test_a_training_that_goes_on_goes_on_in_its_run(package, tmp_path):
    with pytest.raises(RuntimeError), metrics.wandb("project", folder=tmp_path) as write:
        write(record(1))
        raise RuntimeError
    (tmp_path / "1").mkdir()
    metrics.wandb("project", folder=tmp_path).finish(None)
    metrics.wandb("project", folder=tmp_path, run="given").finish(None)
    assert [call["id"] for call in package.calls] == [None, "drawn0", "given"]
    assert package.runs[0].exits == [1] and all(call["resume"] == "allow" for call in package.calls)


def test_a_login_that_is_refused_is_an_error_at_the_start(package):
    package.problem = Errors.UsageError("No API key configured.")
    with pytest.raises(ValueError, match="W&B project project: No API key configured; WANDB_MODE=offline needs no"):
        metrics.wandb("project")


def test_a_server_that_is_absent_is_an_error_before_the_training(package):
    package.mode = "online"
    with pytest.raises(ConnectionError, match=r"nobody answers at 127\.0\.0\.1:1"):
        metrics.wandb("project")


def test_a_later_record_goes_on_in_the_run_that_was_ended(package):
    write = metrics.wandb("project")
    for step in (1, 2):
        write(record(step))
        write.finish()
    assert [call["id"] for call in package.calls] == [None, "drawn0"]
    assert [run.rows[0]["step"] for run in package.runs] == [1, 2]


def test_of_several_processes_the_first_writes(package, monkeypatch):
    monkeypatch.setattr(weights_and_biases, "process_count_and_id", lambda: (2, 1))
    write = metrics.wandb("project")
    write(record(1))
    write.finish()
    assert not package.calls
