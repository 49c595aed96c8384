"""Find a model of the Hugging Face hub by its name, in the cache on this machine, or by downloading it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_SMALL = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""The names of files with configurations and tokenizers."""


def find_on_hub(name: str, needs: Iterable[str]) -> Path:
    """Return the folder with the files of a model in the hub's cache; download those that are missing.

    Nothing is downloaded if HF_HUB_OFFLINE is set.

    Args:
      name: "owner/name".
      needs: patterns of the names of files that the model must have. They are downloaded, together with its
        configuration and its tokenizer.

    Raises:
      ImportError: huggingface_hub is not installed.
      FileNotFoundError: the hub has no such model, or it is not in the cache and HF_HUB_OFFLINE is set.
      PermissionError: the model is gated.
      ConnectionError: the hub can't be reached, or fails.
    """
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError as error:
        raise ImportError(
            f"js.hf: {name} is no folder, and a model of the hub needs huggingface_hub: pip install huggingface_hub"
        ) from error
    patterns = [*_SMALL, *needs]
    missing = f"js.hf: there is no folder {name}, and {constants.HF_HUB_CACHE} does not have all files of such a model"
    try:
        found = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        if not _lacks(found, needs):
            return found
    except errors.LocalEntryNotFoundError:
        pass
    except errors.HFValidationError as error:
        raise FileNotFoundError(f"js.hf: there is no folder {name}, and it is no name of a model on the hub") from error
    if constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(f"{missing}; HF_HUB_OFFLINE is set: unset it, or run `hf download {name}` elsewhere")
    try:
        found = Path(snapshot_download(name, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{missing}; the model is gated: ask for access at {constants.ENDPOINT}/{name}, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{missing}; the hub has no model of this name, or it is private: then run `hf auth login`"
        ) from error
    except OSError as error:
        reason = str(error.__cause__ or error).split("\n")[0]
        raise ConnectionError(f"{missing}; they could not be downloaded: {reason}") from error
    if lacks := _lacks(found, needs):
        raise FileNotFoundError(f"js.hf: {name} on the hub has no {' and no '.join(lacks)}; give a model that has it")
    return found


def _lacks(folder: Path, needs: Iterable[str]) -> list[str]:
    return [pattern for pattern in needs if not any(folder.glob(pattern))]
