"""Keyed digests, by which a checkpoint is known to be the one that was saved, and not one that somebody has changed.

Checksums find accidents: whoever changes a file on purpose can write the checksums that fit. With a key, the manifest
names the SHA-256 of every file and its own HMAC-SHA256 (RFC 2104), which nobody can write without the key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path
from typing import Any

from jaxshard.checkpoint.manifest import Manifest, encode_manifest
from jaxshard.checkpoint.strict_json import read_plain_file
from jaxshard.distributed.together import gather_ints

KEY_VARIABLE = "JAXSHARD_CHECKPOINT_KEY"
"""The environment variable in which the command line looks for a key."""
_LEAST = 16
"""Bytes of the shortest key."""


class WrongKey(ValueError):
    """Raised for a step that was saved with another key than the one that is given, or was changed since."""


def check_key(key: Any) -> None:
    """Raise unless this is None or can be the key of a digest.

    Raises:
      TypeError: it is no bytes object, such as a random key of JAX.
      ValueError: it is so short that it could be guessed.
    """
    if key is None:
        return
    if not isinstance(key, bytes):
        raise TypeError(f"key is the secret of a keyed digest, as bytes; got {type(key).__name__}")
    if len(key) < _LEAST:
        raise ValueError(f"key has {len(key)} bytes; give at least {_LEAST}, such as secrets.token_bytes(32)")


def read_key(file: Path | None) -> bytes | None:
    """Read the key of the command line: the content of a file, or of the environment variable JAXSHARD_CHECKPOINT_KEY.

    Blanks and line breaks around it are no part of the key.

    Args:
      file: the file; None for the variable.

    Returns:
      The key; None where no file is given and the variable is not set.

    Raises:
      ValueError: it is shorter than 16 bytes.
      OSError: the file can't be read.
    """
    given = None if file is not None else os.environ.get(KEY_VARIABLE)
    if file is None and given is None:
        return None
    key = read_plain_file(file).strip() if file is not None else os.fsencode(given or "").strip()
    try:
        check_key(key)
    except ValueError as error:
        raise ValueError(f"{file or KEY_VARIABLE}: {error}") from error
    return key


def agree_on_key(key: bytes | None) -> None:
    """Raise ValueError in all processes unless they have one key, or none. Collective."""
    mine = -1 if key is None else int.from_bytes(hmac.digest(key, b"fingerprint", "sha256")[:4], "big") >> 1
    if len(set(gather_ints(mine, "js.save, key"))) > 1:
        raise ValueError("js.save: the processes have different keys; give all of them the same one")


def sign(manifest: Manifest, key: bytes) -> Manifest:
    """Return a manifest, which has the SHA-256 of every file, with its HMAC."""
    return manifest._replace(hmac=_hmac_of(manifest, key))


def check_signature(folder: Path, manifest: Manifest, key: bytes | None) -> None:
    """Raise unless a manifest was saved with this key; without a key, unless it was saved without one.

    The files are compared later, with the SHA-256 of each that the manifest names.

    Raises:
      WrongKey: it was not; the message names the step and says what to do.
    """
    if key is None and manifest.hmac is None:
        return
    if key is None:
        raise WrongKey(
            f"{folder}: this step was saved with a key, and none is given; give the same one as key=, or on the "
            f"command line with --key-file or {KEY_VARIABLE}"
        )
    if manifest.hmac is None:
        raise WrongKey(
            f"{folder}: this step was saved without a key, so nothing tells whether somebody has changed it; leave the "
            "key out if you trust the step all the same"
        )
    if manifest.sha256 is None or manifest.sha256.keys() != manifest.files.keys():
        raise WrongKey(f"{folder}: its manifest does not name the SHA-256 of every file")
    if not hmac.compare_digest(manifest.hmac.encode(errors="replace"), _hmac_of(manifest, key).encode()):
        raise WrongKey(
            f"{folder}: the HMAC in its manifest is not the one of this key: it was saved with another key, or changed "
            "by somebody who does not have it"
        )


def new_digest(signed: bool) -> Any:
    """Return an object that computes the SHA-256 of a file, or None for steps without a key."""
    return hashlib.sha256() if signed else None


def _hmac_of(manifest: Manifest, key: bytes) -> str:
    return hmac.digest(key, encode_manifest(manifest._replace(hmac=None)), "sha256").hex()
