"""The local S3 server."""

from tests.storage.server import bucket as bucket
