"""Check that a tracking server answers at its address, and show the address without a password."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

_SECONDS = 5.0
"""Seconds to wait for a server to answer; the services' own packages would try again for minutes."""


def check_answers(address: str) -> None:
    """Raise ConnectionError if no server answers at an http(s) address; accept all other values, such as file paths."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.scheme in getproxies():
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), _SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nobody answers at {parts.hostname}:{port} ({error})") from error


def without_password(address: str) -> str:
    """Return the address without its user and password."""
    parts = urlsplit(address)
    return address.replace(f"{parts.username}:{parts.password}@", "") if parts.password else address
