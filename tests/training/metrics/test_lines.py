"""The writer of JSON lines."""

import json
import resource
import threading
import time
import warnings

import pytest

from jaxshard.storage.paths import as_path
from jaxshard.training import metrics
from jaxshard.training.metrics import lines
from tests.training.metrics.records import RECORDS


def test_json_lines_are_written_at_once_in_full_precision_and_appended(tmp_path):
    path = tmp_path / "log.jsonl"
    write = metrics.json_lines(path)
    assert path.read_text() == ""
    write(RECORDS[0])
    assert json.loads(path.read_text()) == metrics.flat(RECORDS[0])
    metrics.json_lines(path)(RECORDS[1])
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [metrics.flat(RECORDS[0]), metrics.flat(RECORDS[1]) | {"loss": None, "grad_norm": None}]
    assert metrics.read_json_lines(path) == found


def test_a_full_disk_is_one_warning_and_leaves_complete_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    write = metrics.json_lines(path)
    write(RECORDS[0])
    before = path.read_text()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 9, limits[1]))  # a part of the next line
    try:
        with pytest.warns(UserWarning) as warned:
            write(RECORDS[1])
            write(RECORDS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (one,) = warned
    assert f"{path} lacks the lines from step {RECORDS[1].step} on" in str(one.message)
    assert path.read_text() == before
    write(RECORDS[0])
    assert path.read_text() == 2 * before


def test_json_lines_refuses_a_path_that_cannot_be_written_before_the_first_step(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        metrics.json_lines(tmp_path / "absent" / "log.jsonl")


@pytest.mark.slow
def test_lines_at_an_address_are_numbered_objects_which_a_resumed_training_goes_on_with(bucket, monkeypatch):
    path = f"{bucket}/run/log.jsonl"
    write = metrics.json_lines(path)
    write(RECORDS[0])
    write.finish()
    monkeypatch.setattr(lines, "_INTERVAL", 0.0)  # a part for each record
    with metrics.json_lines(path) as write:
        for one in (RECORDS[1], RECORDS[0]):
            write(one)
            count = len(as_path(path).files())
            while not write._pending and len(as_path(path).files()) == count:
                time.sleep(0.01)
    parts = as_path(path).files()
    assert parts == [f"{number:06d}" for number in range(1, len(parts) + 1)]
    found = metrics.read_json_lines(path)
    assert found == [metrics.flat(RECORDS[0]), metrics.flat(RECORDS[1]) | {"loss": None, "grad_norm": None}, found[0]]


@pytest.mark.slow
def test_lines_that_the_store_refuses_are_kept_and_written_later(bucket, monkeypatch):
    path = as_path(f"{bucket}/log.jsonl")
    refused = threading.Event()
    append = lines.append_part

    def refuse(*args):
        monkeypatch.setattr(lines, "append_part", append)
        refused.set()
        raise ConnectionError("no answer")

    monkeypatch.setattr(lines, "append_part", refuse)
    monkeypatch.setattr(lines, "_INTERVAL", 0.0)
    write = metrics.json_lines(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the refusal, if it is seen before the second attempt
        write(RECORDS[0])
        assert refused.wait(30)
        write(RECORDS[0])
    write.finish()
    assert metrics.read_json_lines(path) == 2 * [metrics.flat(RECORDS[0])]


@pytest.mark.slow
def test_an_address_without_a_bucket_is_refused_before_the_first_step(bucket):
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        metrics.json_lines("s3://no-such-bucket-anywhere/log.jsonl")
