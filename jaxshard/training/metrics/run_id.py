"""The id of a run in a tracking service, kept in a file so that a resumed training continues the same run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jaxshard.core.file_errors import naming


class RunId(NamedTuple):
    """The sources of a run's id.

    Attributes:
      service: the name of the service, which also names the file.
      given: the id that the user passed, or None.
      folder: the folder of checkpoints, in which the id is kept, or None.
    """

    service: str
    given: str | None
    folder: Path | None

    def find(self) -> str | None:
        """Return the id of the run to resume; None for a new run, also if no step was saved in the folder yet."""
        if self.given is not None or self._file is None or not self._file.exists():
            return self.given
        if not any(path.name.isdecimal() for path in self._file.parent.iterdir()):
            return None
        with naming(self._file):
            return self._file.read_text().strip() or None

    def keep(self, id: str) -> None:
        """Write the id of the new or resumed run."""
        if self._file is not None:
            with naming(self._file):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(id + "\n")

    @property
    def _file(self) -> Path | None:
        return None if self.folder is None else self.folder / f".{self.service}-run"
