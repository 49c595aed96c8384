"""The file in which a process keeps two steps: what is written comes back, and one step is whole at every moment."""

import errno
import os

import numpy as np
import pytest

from jaxshard.checkpoint.checksums import Damaged
from jaxshard.checkpoint.memory import segment as module
from jaxshard.checkpoint.memory.segment import MOST_DATA, Header, Record, create_segment, open_segment
from tests.small_disk import small_disk

SIZES = {"a": 10, "b": 0, "c": 5000}
HEADER = Header({"process": "0 of 2", "mesh": "data=2"}, {"w": "float32[4, 2]"}, SIZES)


def blocks(seed, sizes=SIZES):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, np.uint8) for size in sizes.values()]


def record(step, run="r", saves=1, data=None):
    return Record(run, step, saves, data, [])


@pytest.fixture
def segment(tmp_path):
    return create_segment(tmp_path / "process-0", HEADER)


def contents(segment, slot):
    """The step of a slot and the bytes of its intact blocks; None if it holds no step."""
    there = segment.record(slot)
    if there is None:
        return None
    found, damaged = segment.read(slot, there, segment.header.blocks)
    return there.step, {name: found[name].tobytes() for name in found}, damaged


def expected(step, seed):
    return step, {name: x.tobytes() for name, x in zip(SIZES, blocks(seed), strict=True)}, []


def test_what_is_written_is_read_by_another_process(segment):
    assert contents(segment, 0) is None and contents(segment, 1) is None
    segment.write(0, record(7, data={"epoch": 2}), blocks(1))
    segment.write(1, record(8), blocks(2))
    other = open_segment(segment.file)
    assert other.header == HEADER and other.record(0).data == {"epoch": 2}
    assert contents(other, 0) == expected(7, 1) and contents(other, 1) == expected(8, 2)
    segment.clear(0)
    assert contents(other, 0) is None and contents(other, 1) == expected(8, 2)
    assert segment.file.stat().st_mode & 0o777 == 0o600 and [path.name for path in segment.file.parent.iterdir()] == [
        "process-0"
    ]


class Killed(Exception):
    pass


@pytest.mark.parametrize("moment", range(4))
def test_a_write_that_is_cut_off_leaves_the_other_step(segment, moment, monkeypatch):
    """Cut off behind the first, second or third block, and before the record."""
    segment.write(0, record(1), blocks(1))
    segment.write(1, record(2), blocks(2))
    crc32, calls = module.zlib.crc32, []

    def killed(*args):
        calls.append(args)
        if len(calls) > moment:
            raise Killed
        return crc32(*args)

    monkeypatch.setattr(module.zlib, "crc32", killed)
    with pytest.raises(Killed):
        segment.write(0, record(3), blocks(3))
    monkeypatch.undo()
    again = open_segment(segment.file)
    assert contents(again, 1) == expected(2, 2) and contents(again, 0) is None


def test_a_flipped_bit_is_found_wherever_it_is(segment):
    segment.write(0, record(5), blocks(5))
    size, rng = segment.file.stat().st_size, np.random.default_rng(0)
    used = [*range(330), *(segment._start + segment._places[2] + i for i in range(0, 5000, 500))]
    for place in [*rng.choice(used, 40), segment._start, segment._start + 20]:
        with segment.file.open("r+b") as opened:
            byte = os.pread(opened.fileno(), 1, place)[0]
            if not byte:
                continue
            os.pwrite(opened.fileno(), bytes([byte ^ 4]), place)
            if place < segment._start:
                with pytest.raises(Damaged, match="header"):
                    open_segment(segment.file)
            else:
                found = contents(segment, 0)
                assert found is None or found[2] == ["c"]
            os.pwrite(opened.fileno(), bytes([byte]), place)
    assert contents(segment, 0) == expected(5, 5) and segment.file.stat().st_size == size


def test_a_file_that_was_cut_is_damaged(segment):
    os.truncate(segment.file, segment.file.stat().st_size - 4096)
    with pytest.raises(Damaged, match=r"bytes, .* are expected"):
        open_segment(segment.file)


def test_memory_that_is_full_is_named_with_both_numbers(tmp_path):
    with small_disk(tmp_path / "memory", 1 << 20) as disk:
        disk.folder.mkdir()
        two = r"two copies .* take 2,\d{3},\d{3} bytes of memory, and 1,0\d\d,\d{3} are free there"
        with pytest.raises(OSError, match=two) as caught:
            create_segment(disk.folder / "process-0", HEADER._replace(blocks={"a": 1_000_000}))
        assert caught.value.errno == errno.ENOSPC and not list(disk.folder.iterdir())
        create_segment(disk.folder / "process-0", HEADER)


def test_a_position_of_the_data_that_is_too_long_is_refused(segment):
    segment.write(0, record(1, data="x" * (MOST_DATA - 2)), blocks(1))
    with pytest.raises(ValueError, match=r"65,537 bytes as JSON.* room for 65,536"):
        segment.write(1, record(2, data="x" * (MOST_DATA - 1)), blocks(2))
    assert contents(segment, 0) == expected(1, 1)
