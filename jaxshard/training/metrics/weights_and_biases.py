"""`wandb`: a writer for Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Self

from jaxshard.core.compat import process_count_and_id
from jaxshard.storage.paths import as_path
from jaxshard.training.metrics.address import check_answers
from jaxshard.training.metrics.configuration import describe
from jaxshard.training.metrics.run_id import RunId
from jaxshard.training.metrics.writer import flat
from jaxshard.training.records import Record


def wandb(
    project: str,
    *,
    config: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    run: str | None = None,
    name: str | None = None,
) -> WandbWriter:
    """Make a callback that writes every number of a record into a run of Weights & Biases.

    wandb's own process sends the records and tries again if the service does not answer, so no step waits. Of several
    processes only the first writes. `WANDB_MODE=offline` and the other environment variables of wandb apply. Numbers
    are plotted against the record's "step", also those of steps that are taken again after a rollback.

    Args:
      project: the name of the project.
      config: facts about the training run, recorded once: numbers, text, dicts, lists, dataclasses, and a `js.Layout`,
        which is recorded as its mesh, its bytes per device and its summary.
      folder: the folder of checkpoints (of `js.Checkpointer`). The id of the W&B run is kept there, so that a training
        that resumes from a step in this folder continues the same W&B run.
      run: the id of the W&B run, in place of a new id or of the kept id.
      name: the name that W&B displays; by default W&B chooses it.

    Returns:
      The callback. `js.fit` ends the W&B run; in a loop of your own use the callback as a context (`with`).

    Raises:
      ImportError: wandb is not installed.
      ValueError: W&B refuses the project, the id or the login.
      ConnectionError: nobody answers at the service's address.

    Example:
        log = js.metrics.wandb("gpt", config={"lr": 3e-4, "layout": layout}, folder="run")
        js.fit(run, step, batches, steps=1000, callbacks=[log])
    """
    id = RunId("wandb", run, None if folder is None else as_path(folder))
    try:
        import wandb as library
    except ImportError as error:
        raise ImportError('js.metrics.wandb needs wandb: pip install "wandb>=0.19"') from error
    return WandbWriter(library, project, describe(config or {}), id, name)


class WandbWriter:
    """The callback that `wandb` returns; it calls the package wandb, whose own process sends the records."""

    def __init__(self, library: Any, project: str, config: dict[str, Any], id: RunId, name: str | None) -> None:
        self._library, self._project, self._config = library, project, config
        self._id, self._title, self._run = id, name, None
        self._writes = process_count_and_id()[1] == 0
        if self._writes:
            self._run = self._open()

    def __call__(self, record: Record) -> None:
        """Log a record and return at once; the first call, and the first after `finish`, opens the W&B run."""
        if self._writes:
            self._run = self._run or self._open()
            self._run.log(flat(record))

    def finish(self, error: BaseException | None = None) -> None:
        """End the W&B run, marked as failed if an error ended the training."""
        if self._run is not None:
            self._run.finish(exit_code=0 if error is None else 1)
            self._run = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.finish(error)

    def _open(self) -> Any:
        """Begin or resume the W&B run, and record the configuration."""
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
