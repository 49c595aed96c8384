"""Numbered objects in place of a file that grows."""

import os

import pytest

from jaxshard.storage.parts import append_part, next_number, read_parts
from jaxshard.storage.paths import as_path
from tests.storage.faults import failing

pytestmark = pytest.mark.slow


def test_parts_follow_each_other_and_two_writers_lose_nothing(bucket, tmp_path):
    log = as_path(f"{bucket}/log.jsonl")
    assert next_number(log) == 1
    mine = append_part(log, b"1\n", 1)
    theirs = append_part(log, b"2\n", 1)  # another program that began at the same time
    assert (mine, theirs) == (2, 3)
    assert append_part(log, b"3\n", mine) == 4 == next_number(log)
    assert log.files() == ["000001", "000002", "000003"]
    assert read_parts(log) == b"1\n2\n3\n"
    (tmp_path / "log").write_bytes(b"0\n")
    assert read_parts(tmp_path / "log") == b"0\n"
    with pytest.raises(FileNotFoundError, match=f"{bucket}/absent: there is no such object"):
        read_parts(as_path(f"{bucket}/absent"))


@pytest.mark.parametrize("fault", ["refused", "lost"])
def test_a_part_whose_answer_is_lost_is_written_once(fault, bucket, monkeypatch):
    log, seen = as_path(f"{bucket}/log.jsonl"), set()

    def every_first_write(request):
        if request.method != "PUT" or "log.jsonl" not in request.path or request.path in seen:
            return ""
        seen.add(request.path)
        return fault

    with failing(os.environ["AWS_ENDPOINT_URL"], every_first_write) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy)
        assert append_part(log, b"1\n", append_part(log, b"0\n", 1)) == 3
    assert len(seen) == 2 and log.files() == ["000001", "000002"] and read_parts(log) == b"0\n1\n"
