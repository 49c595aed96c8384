"""`mlflow`: a writer for the experiments of MLflow."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxshard.storage.paths import as_path
from jaxshard.training.metrics.address import check_answers, without_password
from jaxshard.training.metrics.background import Background, End
from jaxshard.training.metrics.configuration import describe, flatten
from jaxshard.training.metrics.run_id import RunId
from jaxshard.training.metrics.writer import flat
from jaxshard.training.records import Record

T = TypeVar("T")

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_METRICS, _PARAMS, _PARAM_LENGTH = 1000, 100, 500
"""Limits of MLflow: the number of metrics and of parameters in a request, and of characters in a parameter."""


def mlflow(
    experiment: str,
    *,
    uri: str | None = None,
    config: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    run: str | None = None,
    name: str | None = None,
) -> Background:
    """Make a callback that writes every number of a record as a metric of a run of MLflow.

    A thread sends the records, so no step waits. Of several processes only the first writes. If the server fails, a
    warning says so, the training goes on, and the records are sent when the server answers again. MLflow's stores can't
    represent infinite numbers, so they are sent as NaN.

    Args:
      experiment: the name of the experiment; it is created if it does not exist.
      uri: the tracking server or store, such as http://host:5000 or sqlite:///runs.db; by default that of the
        environment variable MLFLOW_TRACKING_URI, else MLflow's own default.
      config: facts about the training run, as for `js.metrics.wandb`. They are logged as parameters with dotted names,
        long texts as files. MLflow parameters can't be changed, so values that differ after resuming are logged as
        tags.
      folder: the folder of checkpoints (of `js.Checkpointer`). The id of the MLflow run is kept there, so that a
        training that resumes from a step in this folder continues the same MLflow run.
      run: the id of an existing MLflow run to continue, in place of a new run or of the run whose id is kept.
      name: the name of a new MLflow run; by default MLflow chooses it.

    Returns:
      The callback. `js.fit` ends the MLflow run; in a loop of your own use the callback as a context (`with`).

    Raises:
      ImportError: MLflow is not installed.
      ValueError: MLflow refuses the experiment, or has no run of this id.

    Example:
        log = js.metrics.mlflow("gpt", uri="sqlite:///runs.db", config={"lr": 3e-4, "layout": layout})
        js.fit(run, step, batches, steps=1000, callbacks=[log])
    """
    id = RunId("mlflow", run, None if folder is None else as_path(folder))
    try:
        import mlflow as library
        import mlflow.entities
        import mlflow.exceptions
    except ImportError as error:
        raise ImportError('js.metrics.mlflow needs MLflow: pip install "mlflow>=3"') from error
    return Background(_Runs(library, experiment, uri, describe(config or {}), id, name))


class _Runs:
    """A run of MLflow, written by MLflow's client, which does not touch a run that the user has active."""

    def __init__(
        self, library: Any, experiment: str, uri: str | None, config: dict[str, Any], id: RunId, name: str | None
    ) -> None:
        self._library, self._experiment, self._uri = library, experiment, uri or library.get_tracking_uri()
        self.name = f"MLflow experiment {experiment} at {without_password(self._uri)}"
        self._config, self._id, self._title = config, id, name
        self._client: Any = None

    def open(self) -> None:
        check_answers(self._uri)
        self._client = self._library.MlflowClient(tracking_uri=self._uri)
        try:
            id = self._id.find() or self._begin()
            found = self._client.get_run(id)
        except self._library.exceptions.MlflowException as error:
            if error.error_code in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED"):
                raise ValueError(f"{self.name}: {error}") from error
            raise
        self._id = self._id._replace(given=id)
        self._id.keep(id)
        self._client.update_run(id, status="RUNNING")
        self._record_config(id, found.data.params)

    def send(self, records: list[Record]) -> None:
        now = time.time_ns() // 1_000_000
        metrics = [
            self._library.entities.Metric(name, value if math.isfinite(value) else math.nan, now, record.step)
            for record in records
            for name, value in flat(record).items()
            if name != "step"
        ]
        for part in _parts(metrics, _METRICS):
            self._client.log_batch(self._id.given, metrics=part)

    def close(self, end: End) -> None:
        self._client.set_terminated(self._id.given, status=_STATUS[end])

    def _begin(self) -> str:
        """Create an MLflow run, and its experiment if it does not exist; return the run's id."""
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        id: str = self._client.create_run(experiment, run_name=self._title).info.run_id
        return id

    def _record_config(self, id: str, known: Mapping[str, str]) -> None:
        facts = {name: str(value) for name, value in flatten(self._config)}
        short = {name: value for name, value in facts.items() if len(value) <= _PARAM_LENGTH}
        new = [self._library.entities.Param(name, value) for name, value in short.items() if name not in known]
        for part in _parts(new, _PARAMS):
            self._client.log_batch(id, params=part)
        for name, value in short.items():
            if known.get(name, value) != value:
                self._client.set_tag(id, name, value)
        for name in facts.keys() - short.keys():
            self._client.log_text(id, facts[name], f"{name}.txt")


def _parts(whole: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (whole[start : start + size] for start in range(0, len(whole), size))
