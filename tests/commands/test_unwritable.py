"""Results into full, read-only and missing places: one line, and before the training where that can be known."""

import errno
import re

import pytest

import jaxshard as js
from jaxshard.commands.json_object import write_json
from jaxshard.commands.main import main
from jaxshard.training.records import Record
from tests.checkpoint.small import BATCH, TX, at, layout, loss_fn, new_run
from tests.small_disk import small_disk
from tests.toys import quick_compile

PAGE = 4096
TINY = ["train", "--steps", "5", "--batch", "8", "--seq", "16", "--devices", "8", "--sample", "0", "--strategy", "ddp"]
FLAGS = ["--json", "--log", "--profile", "--tensorboard", "--checkpoint"]


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", 100 * PAGE) as made:
        made.folder.mkdir()
        yield made


def refused(flag, path, capsys):
    assert main([*TINY, flag, str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == "", "nothing was begun"
    (line,) = output.err.splitlines()
    assert line.startswith(f"jaxshard: {flag} {path}")
    return line


def test_a_full_or_read_only_disk_is_refused_before_the_training(disk, capsys):
    for flag in FLAGS:
        disk.leave(0)
        assert refused(flag, disk.folder / "new", capsys).endswith("can't be written: No space left on device")
        disk.empty()
        with disk.read_only():
            line = refused(flag, disk.folder / "new", capsys)
        assert line.endswith("can't be written: Read-only file system")
    assert list(disk.folder.iterdir()) == []


@pytest.mark.parametrize("flag", FLAGS)
def test_a_place_where_nothing_can_be_is_refused_before_the_training(flag, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    refused(flag, tmp_path / "file" / "below", capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "text.py"
    file.write_bytes(bytes(range(32, 127)) * 400)
    return file


@pytest.mark.slow
def test_a_disk_that_fills_up_during_the_training_is_a_line(text, disk, capsys):
    disk.leave(PAGE)  # enough for the check
    with quick_compile():
        assert main([*TINY, "--data", str(text), "--checkpoint", str(disk.folder / "new")]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.match(rf"jaxshard: {disk.folder / 'new'}.*No space left", error)


@pytest.mark.slow
def test_a_file_that_can_not_be_written_in_the_end_is_a_line(text, capsys):
    with quick_compile():
        assert main([*TINY, "--data", str(text), "--json", "/dev/full"]) == 1
    assert capsys.readouterr().err == "jaxshard: /dev/full: No space left on device\n"


@pytest.mark.slow
def test_a_log_that_can_not_be_written_does_not_end_the_training(text):
    with quick_compile(), pytest.warns(UserWarning, match="No space left on device") as warned:
        assert main([*TINY, "--data", str(text), "--log", "/dev/full"]) == 0
    assert len([one for one in warned if "/dev/full" in str(one.message)]) == 1


def check_alone(error, number, path):
    """One exception, with its number and the file, and no other one printed above it."""
    assert error.errno == number and str(path) in str(error)
    assert error.__cause__ is None and (error.__suppress_context__ or error.__context__ is None)


def test_the_library_raises_one_error_with_its_number(disk):
    record = Record(1, {"loss": 1.0}, 0.5, {})
    write = js.metrics.tensorboard(disk.folder / "events")
    disk.leave(0)
    with pytest.raises(OSError) as raised:
        write(record)
    check_alone(raised.value, errno.ENOSPC, disk.folder / "events")
    with pytest.raises(OSError) as raised:
        write_json(disk.folder / "json", {"steps": list(range(PAGE))})
    check_alone(raised.value, errno.ENOSPC, disk.folder / "json")
    with pytest.raises(OSError) as raised:
        js.save(disk.folder, at(1), layout())
    check_alone(raised.value, errno.ENOSPC, disk.folder / "1")


@pytest.mark.slow
def test_a_profile_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    step = js.make_step(loss_fn, TX, layout())
    with pytest.raises(OSError, match="the profile could not be written") as raised:
        js.fit(new_run(), step, [BATCH] * 6, steps=6, profile=tmp_path / "file")
    check_alone(raised.value, raised.value.errno, tmp_path / "file")
    js.fit(new_run(), step, [BATCH] * 6, steps=6, profile=tmp_path / "folder")  # another one can be written
    assert list((tmp_path / "folder").rglob("*.xplane.pb"))
