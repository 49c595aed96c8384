"""`wandb`: a writer for Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from jaxshard.core.compat import process_count_and_id
from jaxshard.core.local_path import local_path
from jaxshard.training.metrics.address import check_answers
from jaxshard.training.metrics.configuration import describe
from jaxshard.training.metrics.run_id import RunId
from jaxshard.training.metrics.writer import flat
from jaxshard.training.records import Record


def wandb(
    project: str,
    *,
    config: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    run: str | None = None,
    name: str | None = None,
) -> WandbWriter:
    """Make a callback that writes every number of a record into a run of Weights & Biases.

    wandb's own process sends the records and tries again where the service does not answer, so no step waits. Of
    several processes the first one writes. `WANDB_MODE=offline` and the other variables of wandb hold. Numbers are
    drawn over "step", also those of steps that are taken again.

    Args:
      project: the name of the project.
      config: facts about the run, recorded once: numbers, text, dicts, lists, dataclasses, and a `js.Layout`, which
        is recorded as its mesh, its bytes per device and its summary.
      folder: the folder of checkpoints (of `js.Checkpointer`). The run's id is kept there, and a training that goes on
        from a step in this folder goes on in the same run.
      run: the id of the run, in place of a new or kept one.
      name: the run's name in pictures; by default W&B makes one.

    Returns:
      The callback. `js.fit` ends its run; in a loop of your own use it as a context (`with`).

    Raises:
      ImportError: wandb is not installed.
      ValueError: W&B refuses the project, the id or the login.
      ConnectionError: nobody answers at the service's address.

    Example:
        log = js.metrics.wandb("gpt", config={"lr": 3e-4, "layout": layout}, folder="run")
        js.fit(run, step, batches, steps=1000, callbacks=[log])
    """
    id = RunId("wandb", run, None if folder is None else local_path(folder))
    try:
        import wandb as library
    except ImportError as error:
        raise ImportError('js.metrics.wandb needs wandb: pip install "wandb>=0.19"') from error
    return WandbWriter(library, project, describe(config or {}), id, name)


class WandbWriter:
    """The callback of `wandb`, by the public functions of its package, whose own process sends the logs."""

    def __init__(self, library: Any, project: str, config: dict[str, Any], id: RunId, name: str | None) -> None:
        self._library, self._project, self._config = library, project, config
        self._id, self._title, self._run = id, name, None
        self._writes = process_count_and_id()[1] == 0
        if self._writes:
            self._run = self._open()

    def __call__(self, record: Record) -> None:
        """Log a record and return at once; after `finish`, resume the same run."""
        if self._writes:
            self._run = self._run or self._open()
            self._run.log(flat(record))

    def finish(self, error: BaseException | None = None) -> None:
        """End the run, as failed if an error ended the training."""
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)
            self._run = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.finish(error)

    def _open(self) -> Any:
        """Begin or resume a run, and record the configuration."""
        found = self._library.setup().settings
        if found.mode not in ("offline", "disabled", "dryrun"):
            check_answers(found.base_url)
        own = {} if "WANDB_CONSOLE" in os.environ else {"console": "off"}  # do not capture printed output
        try:
            run = self._library.init(
                project=self._project,
                id=self._id.find(),
                resume="allow",
                name=self._title,
                settings=self._library.Settings(**own),
            )
        except (self._library.errors.UsageError, self._library.errors.AuthenticationError) as error:
            what = f"W&B project {self._project}: {str(error).rstrip('.')}"
            raise ValueError(f"{what}; WANDB_MODE=offline needs no login") from error
        self._id = self._id._replace(given=run.id)
        self._id.keep(run.id)
        run.define_metric("*", step_metric="step")  # steps repeat if a run is resumed or rolled back
        run.config.update(self._config, allow_val_change=True)
        return run
