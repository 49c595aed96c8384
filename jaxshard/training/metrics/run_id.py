"""The id of a run in a tracking service, kept in a file so that a training that is resumed goes on in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jaxshard.core.file_errors import naming


class RunId(NamedTuple):
    """Where a run's id comes from.

    Attributes:
      service: the name of the service, which is that of the file too.
      given: the id that the user gave, or None.
      folder: the folder of checkpoints, beside whose steps the id is kept, or None.
    """

    service: str
    given: str | None
    folder: Path | None

    def find(self) -> str | None:
        """Return the id of the run to go on in; None for a new run, as in a folder where no step was saved yet."""
        if self.given is not None or self._file is None or not self._file.exists():
            return self.given
        if not any(path.name.isdecimal() for path in self._file.parent.iterdir()):
            return None
        with naming(self._file):
            return self._file.read_text().strip() or None

    def keep(self, id: str) -> None:
        """Write the id of the run that was begun or is gone on in."""
        if self._file is not None:
            with naming(self._file):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(id + "\n")

    @property
    def _file(self) -> Path | None:
        return None if self.folder is None else self.folder / f".{self.service}-run"
