"""The writers of training records."""

import json
import math
import struct
import sys
import time

import pytest

from jaxshard.training import metrics
from jaxshard.training.records import Record

RECORDS = [
    Record(1, {"loss": 5.371376037597656, "grad_norm": 1.5}, 0.5, {"tokens_per_second": 4096.0}),
    Record(2, {"loss": math.nan, "grad_norm": math.inf}, 0.25, {"tokens_per_second": 8192.0}, {"loss": 2.5}),
]


def test_flat_puts_all_numbers_side_by_side():
    assert metrics.flat(RECORDS[1])["eval/loss"] == 2.5
    assert metrics.flat(RECORDS[0]) == {
        "step": 1, "seconds": 0.5, "loss": 5.371376037597656, "grad_norm": 1.5, "tokens_per_second": 4096.0,
    }  # fmt: skip


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


def test_json_lines_refuses_a_path_that_cannot_be_written_before_the_first_step(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        metrics.json_lines(tmp_path / "absent" / "log.jsonl")


def test_tensorboard_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="tensorboardX: pip install tensorboardX"):
        metrics.tensorboard(tmp_path)


def test_tensorboard_files_hold_every_number_at_its_step(tmp_path):
    write = metrics.tensorboard(tmp_path)
    for record in RECORDS:
        write(record)
    deadline = time.monotonic() + 60
    while "eval/loss" not in (found := scalars(tmp_path)).get(2, {}) and time.monotonic() < deadline:
        time.sleep(0.2)  # a thread of tensorboardX writes every two seconds
    assert found[1] == {name: value for name, value in metrics.flat(RECORDS[0]).items() if name != "step"}
    assert found[2]["eval/loss"] == 2.5 and math.isnan(found[2]["loss"]) and math.isinf(found[2]["grad_norm"])


def scalars(folder):
    """{step: {name: value}} of an event file: records of length, checksum, bytes, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    (file,) = folder.glob("events.out.tfevents.*")
    content = file.read_bytes()
    while len(content) > 16 and len(content) >= 16 + (size := struct.unpack("<Q", content[:8])[0]):
        event = Event.FromString(content[12 : 12 + size])
        for value in event.summary.value:
            found.setdefault(event.step, {})[value.tag] = value.simple_value
        content = content[16 + size :]
    return found
