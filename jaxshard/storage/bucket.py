"""Open a bucket by TensorStore, with the endpoint, region and credentials that the environment names.

TensorStore itself ignores the variables AWS_ENDPOINT_URL and AWS_REGION, which all other tools obey.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

SCHEMES = ("s3", "gs")
"""The schemes of the addresses of object stores."""
_RETRIES = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "8s"}
"""A request is tried again for about 40 seconds; TensorStore's own default are many minutes."""


def bucket_spec(scheme: str, bucket: str, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the TensorStore spec of a bucket.

    Args:
      scheme: "s3" or "gs".
      bucket: the name of the bucket.
      environ: the environment: AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or AWS_DEFAULT_REGION, and
        AWS_ACCESS_KEY_ID.

    Example:
      >>> bucket_spec("s3", "runs", {"AWS_REGION": "eu-west-1"})["aws_region"]
      'eu-west-1'
    """
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "gcs_request_retries": _RETRIES}
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "s3_request_retries": _RETRIES}
    if endpoint:
        spec |= {"endpoint": endpoint, "aws_region": "us-east-1"}  # a store with an endpoint needs some region
    if region:
        spec["aws_region"] = region
    if environ.get("AWS_ACCESS_KEY_ID"):  # else TensorStore prints errors about the files in ~/.aws
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def open_bucket(scheme: str, bucket: str) -> Any:
    """Return the `tensorstore.KvStore` of a bucket; it is opened once for each endpoint and region."""
    return _open(
        tuple(sorted((name, str(value)) for name, value in bucket_spec(scheme, bucket).items())), scheme, bucket
    )


@functools.cache
def _open(environment: tuple[tuple[str, str], ...], scheme: str, bucket: str) -> Any:
    # A request to which a server sends no byte for half a minute fails, and is tried again.
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "30")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    import tensorstore  # a tenth of a second, which programs without object storage do not need

    return tensorstore.KvStore.open(bucket_spec(scheme, bucket)).result()
