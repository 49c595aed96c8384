"""The writer for MLflow: its calls of the package, and the package itself with a store in a file."""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from jaxshard.training import metrics
from tests.training.metrics.records import RECORDS, record


class MlflowException(Exception):
    error_code = "RESOURCE_DOES_NOT_EXIST"


class Client:
    """Runs in memory, by MLflow's own rule that a parameter never changes."""

    def __init__(self, tracking_uri):
        self.uri = tracking_uri

    runs: ClassVar = {}

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return f"the id of {name}"

    def create_run(self, experiment, run_name):
        id = f"drawn{len(self.runs)}"
        self.runs[id] = SimpleNamespace(
            info=SimpleNamespace(run_id=id), data=SimpleNamespace(params={}), experiment=experiment,
            status=[], metrics=[], tags={}, texts={},
        )  # fmt: skip
        return self.runs[id]

    def get_run(self, id):
        if id not in self.runs:
            raise MlflowException(f"no run {id}")
        return self.runs[id]

    def update_run(self, id, status):
        self.runs[id].status.append(status)

    set_terminated = update_run

    def log_batch(self, id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        self.runs[id].metrics += metrics
        for name, value in params:
            assert self.runs[id].data.params.setdefault(name, value) == value

    def set_tag(self, id, name, value):
        self.runs[id].tags[name] = value

    def log_text(self, id, text, file):
        self.runs[id].texts[file] = text


@pytest.fixture
def runs(monkeypatch):
    """The part of the package that is used; returns the runs by their ids."""
    package, entities, exceptions = (ModuleType(f"mlflow{part}") for part in ("", ".entities", ".exceptions"))
    entities.Metric = lambda name, value, time, step: (step, name, value)
    entities.Param = lambda name, value: (name, value)
    exceptions.MlflowException = MlflowException
    package.entities, package.exceptions, package.MlflowClient = entities, exceptions, Client
    package.get_tracking_uri = lambda: "file"
    for module in (package, entities, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Client, "runs", {})
    return Client.runs


def test_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match='needs MLflow: pip install "mlflow'):
        metrics.mlflow("experiment")


def test_every_number_and_the_configuration_are_written(runs):
    write = metrics.mlflow("gpt", config={"lr": 0.5, "mesh": {"data": 8}, "summary": "x" * 501})
    for one in RECORDS:
        write(one)
    write.finish(None)
    run = runs["drawn0"]
    assert run.metrics[:2] == [(1, "seconds", 0.5), (1, "loss", 5.371376037597656)]
    assert all(math.isnan(value) for _, name, value in run.metrics if _ == 2 and name in ("loss", "grad_norm"))
    assert (2, "eval/loss", 2.5) in run.metrics and run.experiment == "the id of gpt"
    assert run.data.params == {"lr": "0.5", "mesh.data": "8"} and run.texts == {"summary.txt": "x" * 501}
    assert run.status == ["RUNNING", "FINISHED"]


def test_a_training_that_goes_on_goes_on_in_its_run(runs, tmp_path):
    with pytest.raises(RuntimeError), metrics.mlflow("gpt", config={"lr": 1}, folder=tmp_path) as write:
        write(record(1))
        raise RuntimeError
    (tmp_path / "1").mkdir()
    with metrics.mlflow("gpt", config={"lr": 2, "new": 3}, folder=tmp_path) as write:
        write(record(2))
    assert list(runs) == ["drawn0"] and runs["drawn0"].status == ["RUNNING", "FAILED", "RUNNING", "FINISHED"]
    assert runs["drawn0"].data.params == {"lr": "1", "new": "3"} and runs["drawn0"].tags == {"lr": "2"}


def test_a_run_that_is_not_there_is_an_error_at_the_start(runs):
    with pytest.raises(ValueError, match="MLflow experiment gpt at file: no run nope"):
        metrics.mlflow("gpt", run="nope")


def test_a_server_that_is_absent_is_a_warning_without_its_password(runs):
    with pytest.warns(RuntimeWarning, match=r"gpt at http://127.0.0.1:1: ConnectionError: nobody answers at"):
        write = metrics.mlflow("gpt", uri="http://me:secret@127.0.0.1:1")
    with pytest.warns(RuntimeWarning, match="1 records were not sent"):
        write(record(1))
        write.finish(None)
