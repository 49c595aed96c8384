"""Readers of manifests: what was written comes back, all else is a ValueError."""

import json
import os
from importlib import metadata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.checkpoint.checksums import find_damage
from jaxshard.checkpoint.manifest import (
    FORMAT,
    Manifest,
    SavedArray,
    Segment,
    _checksum_line,
    decode_manifest,
    encode_manifest,
    read_manifest,
)
from jaxshard.commands.main import main
from tests.checkpoint.small import TX, init_fn, layout

GOOD = Manifest(
    step=3,
    arrays=(SavedArray("params/w", (2, 3), "float32"), SavedArray("key", (), "key<fry>")),
    files={"arrays/d/1": (Segment(10, 2**32 - 1, 0), Segment(0, 0, None)), "arrays/x": ()},
    data={"epoch": [1, None, 2.5, "\N{SNOWMAN}\n"]},
    made={"mesh": {"data": 2}},
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def sealed(value):
    line = json.dumps(value).encode() + b"\n"
    return line + _checksum_line(line)


def resealed(old, new):
    """The good manifest with a piece of its line replaced, and a checksum that fits."""
    line = encode_manifest(GOOD).splitlines(keepends=True)[0]
    assert line.count(old) == 1
    return line.replace(old, new) + _checksum_line(line.replace(old, new))


def test_what_was_written_comes_back():
    assert decode_manifest(encode_manifest(GOOD)) == GOOD
    assert encode_manifest(GOOD).count(b"\n") == 2


def check_refused(raw):
    for content in (raw, raw + b"\n" + _checksum_line(raw + b"\n")):
        with pytest.raises(ValueError):
            decode_manifest(content)


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=200))
def test_bytes_are_refused(raw):
    check_refused(raw)


PLACES = [("step",), ("arrays",), ("files",), ("made",), ("format",), ("arrays", 0), ("files", "arrays/d/1")]
PLACES += [("arrays", 0, name) for name in SavedArray._fields] + [("files", "arrays/d/1", 0, i) for i in range(3)]
PLACES += [("arrays", 0, "shape", 0), ("files", "arrays/d/1", 0)]


def check_place(place, value, away):
    fields = json.loads(encode_manifest(GOOD).splitlines()[0])
    inner = fields
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    if away:
        del inner[place[-1]]
    try:
        made = decode_manifest(sealed(fields))
    except ValueError:
        return
    assert json.loads(encode_manifest(made).splitlines()[0]) == fields  # nothing was changed or overlooked


@settings(max_examples=12, deadline=None)
@given(place=st.sampled_from(PLACES), value=JSON, away=st.booleans())
def test_anything_in_any_place_is_refused_or_is_what_it_says(place, value, away):
    check_place(place, value, away)


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(place=st.sampled_from(PLACES), value=JSON, away=st.booleans(), raw=st.binary(max_size=200))
def test_many_manifests(place, value, away, raw):
    check_place(place, value, away)
    check_refused(raw)


@settings(max_examples=100, deadline=None)
@given(name=st.text(max_size=12) | st.sampled_from(["../x", "/x", "a/../b", "a//b", ".", "", "manifest.json", "a\\b"]))
def test_files_lie_in_the_folder_of_the_step(name, tmp_path_factory):
    fields = json.loads(encode_manifest(GOOD._replace(files={})).splitlines()[0]) | {"files": {name: []}}
    try:
        decode_manifest(sealed(fields))
    except ValueError:
        return
    root = tmp_path_factory.getbasetemp() / "step"
    assert root in (root / name).resolve().parents and name not in ("", "manifest.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (sealed([1]), "no JSON object"),
        (sealed({}), "not the manifest"),
        (resealed(b'"step": 3', b'"step": 3, "step": 4'), "one key twice"),
        (resealed(b"2.5", b"NaN"), "NaN is no finite number"),
        (resealed(b"2.5", b"1e999"), "1e999 is no finite number"),
        (resealed(b"[2, 3]", b"[2, 1%s]" % (b"0" * 400)), "wrong shape"),
        (resealed(b"[10, 4", b"[1%s, 4" % (b"0" * 400)), "wrong segment"),
        (sealed({"format": FORMAT + 1, "anything": 1}), f"format {FORMAT + 1}, .*reads format {FORMAT}"),
        (sealed({"format": FORMAT}), "wrong fields"),
        (b"[" * 100_000 + b"\n" + _checksum_line(b"[" * 100_000 + b"\n"), "no JSON"),
        (b"", "checksum"),
    ],
)
def test_messages(content, message, tmp_path):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"manifest.json: .*{message}"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("place", [b"[2, 3]", b"2.5", b'"step": 3', b'"data": 2'])
def test_numbers_that_are_none_are_told_by_every_command(place, tmp_path, capsys):
    """As a size, in the position of the data, as the step and in what was noted of the save."""
    (tmp_path / "3").mkdir()
    value = place.replace(b"3" if b"3" in place else b"2", b"9" * 5000).replace(b".5", b"")
    (tmp_path / "3" / "manifest.json").write_bytes(resealed(place, value))
    for action in ("list", "show", "verify"):
        assert main(["checkpoint", action, str(tmp_path)]) == 1
        shown = capsys.readouterr()
        assert "3: damaged" in shown.out and "Traceback" not in shown.out + shown.err


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_no_file_is_not_opened(kind, tmp_path):
    """Opening a named pipe would wait for a writer."""
    file = tmp_path / "manifest.json"
    os.mkfifo(file) if kind == "pipe" else file.mkdir()
    with pytest.raises(ValueError, match=r"manifest.json: can't be read: (not a plain file|Is a directory)"):
        read_manifest(tmp_path)
    assert len(find_damage(tmp_path)) == 1


def test_a_checkout_that_is_not_installed_saves(tmp_path, monkeypatch):
    """As a folder on the path of a machine where nothing can be installed."""

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    js.save(tmp_path, js.init(init_fn, TX, layout(), key=0), layout())
    assert read_manifest(tmp_path / "0").made["jaxshard"] == js.__version__
