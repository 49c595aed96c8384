"""The address of a tracking server: whether anybody answers there, and how it is shown."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

_SECONDS = 5.0
"""Seconds after which a server counts as absent; the services' own packages would try again for minutes."""


def check_answers(address: str) -> None:
    """Raise ConnectionError if nobody listens at the address of a server; anything else, such as a file, may pass."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.scheme in getproxies():
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), _SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nobody answers at {parts.hostname}:{port} ({error})") from error


def without_password(address: str) -> str:
    """Return the address as it may be shown."""
    parts = urlsplit(address)
    return address.replace(f"{parts.username}:{parts.password}@", "") if parts.password else address
