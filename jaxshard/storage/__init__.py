"""Object storage: paths such as s3://bucket/run and gs://bucket/run, read and written through TensorStore.

    paths.py     `ObjectPath`, with the methods of `pathlib.Path` that this package uses; `as_path` takes either
    bucket.py    opens a bucket by TensorStore, with the environment's endpoint, region and credentials
    failures.py  turns errors of TensorStore into OSErrors of one line
    copies.py    reads objects in ranges, and copies them into a cache on this machine
    parts.py     writes numbered objects in place of a file that grows

Imports `core/`.
"""
