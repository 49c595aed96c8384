"""The id of a run in a tracking service, kept in a file so that a resumed training continues the same run."""

from __future__ import annotations

from typing import NamedTuple

from jaxshard.core.file_errors import naming
from jaxshard.storage.paths import AnyPath


class RunId(NamedTuple):
    """The id of a run in a tracking service: passed by the user, or kept in a file of the checkpoint folder.

    Attributes:
      service: the name of the service, which is a part of the file's name.
      given: the id that the user passed, or None.
      folder: the folder of checkpoints, in which the id is kept, or None.
    """

    service: str
    given: str | None
    folder: AnyPath | None

    def find(self) -> str | None:
        """Return the id of the run to resume, passed by the user or kept in the folder; None for a new run.

        A kept id is ignored if the folder has no checkpoint yet.
        """
        if self.given is not None or self._file is None or not self._file.exists():
            return self.given
        if not any(path.name.isdecimal() for path in self._file.parent.iterdir()):
            return None
        with naming(str(self._file)):
            return self._file.read_bytes().decode().strip() or None

    def keep(self, id: str) -> None:
        """Write the id of the new or resumed run into the folder, if there is one."""
        if self._file is not None:
            with naming(str(self._file)):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_bytes(f"{id}\n".encode())

    @property
    def _file(self) -> AnyPath | None:
        return None if self.folder is None else self.folder / f".{self.service}-run"
