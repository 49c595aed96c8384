"""The writer of TensorBoard's event files."""

import math
import struct
import sys

import pytest

from jaxshard.training import metrics
from tests.training.metrics.records import RECORDS, record


def test_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match='tensorboardX: pip install "tensorboardX'):
        metrics.tensorboard(tmp_path)


def test_files_hold_every_number_at_its_step_and_the_configuration_once(tmp_path):
    write = metrics.tensorboard(tmp_path, config={"lr": 0.5})
    for one in RECORDS:
        write(one)
    found, texts, starts = read(tmp_path)  # every record is written at once
    assert found[1] == {name: value for name, value in metrics.flat(RECORDS[0]).items() if name != "step"}
    assert found[2]["eval/loss"] == 2.5 and math.isnan(found[2]["loss"]) and math.isinf(found[2]["grad_norm"])
    assert texts == ['```json\n{\n  "lr": 0.5\n}\n```'] and starts == []


def test_a_resumed_run_says_from_which_step_older_files_are_out_of_date(tmp_path):
    write = metrics.tensorboard(tmp_path)
    write(record(7))
    write.finish(None)
    write.finish(ValueError())  # closed already
    assert read(tmp_path)[2] == [7]


def read(folder):
    """Return ({step: {name: value}}, texts, steps of starts) of event files, records of length, sum, bytes, sum."""
    from tensorboardX.proto.event_pb2 import Event

    found, texts, starts = {}, [], []
    (file,) = folder.glob("events.out.tfevents.*")
    content = file.read_bytes()
    while len(content) > 16 and len(content) >= 16 + (size := struct.unpack("<Q", content[:8])[0]):
        event = Event.FromString(content[12 : 12 + size])
        if event.HasField("session_log"):
            starts.append(event.step)
        for value in event.summary.value:
            if value.HasField("tensor"):
                texts += [text.decode() for text in value.tensor.string_val]
            else:
                found.setdefault(event.step, {})[value.tag] = value.simple_value
        content = content[16 + size :]
    return found, texts, starts
