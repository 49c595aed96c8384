"""The writer of JSON lines."""

import json
import resource

import pytest

from jaxshard.training import metrics
from tests.training.metrics.records import RECORDS


def test_json_lines_are_written_at_once_in_full_precision_and_appended(tmp_path):
    path = tmp_path / "log.jsonl"
    write = metrics.json_lines(path)
    assert path.read_text() == ""
    write(RECORDS[0])
    assert json.loads(path.read_text()) == metrics.flat(RECORDS[0])
    metrics.json_lines(path)(RECORDS[1])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == metrics.flat(RECORDS[0])
    assert lines[1] == metrics.flat(RECORDS[1]) | {"loss": None, "grad_norm": None}


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
