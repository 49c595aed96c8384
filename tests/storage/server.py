"""A local S3 server for tests: moto's, in a thread of the test process, once for all tests of the process.

    from tests.storage.server import bucket as bucket  # in a conftest.py: it is a fixture

    def test_something(bucket):
        js.save(f"{bucket}/run", run, layout)

The fixture `bucket` is the address of a new bucket, such as "s3://b3f2...". While the test runs, AWS_ENDPOINT_URL and
credentials are in the environment, which processes that the test starts inherit. Tests are skipped without moto.
"""

from __future__ import annotations

import atexit
import functools
import logging
import urllib.request
import uuid
import warnings

import pytest


@functools.cache
def server() -> str:
    """Start the server, and return its address, http://127.0.0.1:PORT; later calls return the same."""
    pytest.importorskip("moto.server", reason="moto is not installed")
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    atexit.register(started.stop)
    host, port = started.get_host_and_port()
    return f"http://{host}:{port}"


def point_at(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """Let this process and its children use the server at an address, with any credentials."""
    patch.setenv("AWS_ENDPOINT_URL", endpoint)
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        patch.delenv(name, raising=False)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a new bucket on the local server, and return its address, s3://NAME."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of moto's own libraries
        endpoint = server()
    point_at(endpoint, monkeypatch)
    name = uuid.uuid4().hex
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")) as answer:
        assert answer.status == 200
    return f"s3://{name}"
