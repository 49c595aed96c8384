"""`jaxshard profile`: tables, the JSON object, and what is refused in one line."""

import json

import pytest

import jaxshard as js
from jaxshard.commands.main import main
from tests.profile.traces import event, write


@pytest.fixture
def folder(tmp_path):
    """A trace of one step on a GPU, with five operations."""
    kernels = [event(f"gemm_{at}", 10 * at, 10 * at + 9 - at, hlo_op=f"dot.{at}") for at in range(4)]
    kernels.append(event("ncclDevKernel_AllGather_RING_LL", 50, 60))
    planes = {
        "/host:CPU": {"python": [event("train", 0, 70, step_num=3)]},
        "/device:GPU:0": {"Stream #13(Compute)": kernels},
    }
    write(tmp_path / "trace" / "plugins" / "profile" / "2026_01_01_00_00_00" / "host.xplane.pb", planes)
    return tmp_path / "trace"


def test_tables_are_printed_and_the_json_object_has_all_rows(folder, tmp_path, capsys):
    assert main(["profile", str(folder), "--top", "2", "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out.json").read_text())
    assert result == json.loads(json.dumps(js.read_profile(folder).as_dict()))
    assert [one["name"] for one in result["exposed"]] == ["ncclDevKernel_AllGather_RING_LL"]
    assert len(result["operations"]) == 5 and "and 3 more" in shown
    for piece in (
        "made by     JAX 0.10.2",
        "host.xplane.pb",
        "   3  0.060    0.030    0.010  0.020  GPU:0",
        "all-gather",
    ):
        assert piece in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "absent: there is no such folder; give the one of --profile or js.fit(profile=...)"),
        (["."], ".: no trace (no *.xplane.pb file) is in it; write one with --profile ."),
        (["foreign.xplane.pb"], "foreign.xplane.pb: cut off, or no trace of JAX's profiler; write or copy it again"),
        (["gs://bucket/run"], "FOLDER gs://bucket/run: files are read and written in a mounted file system"),
        ([".", "--top", "0"], "--top 0: give a number above 0"),
        ([], "FOLDER must be given; see jaxshard profile --help"),
    ],
)
def test_what_can_not_be_read_is_refused_in_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if words == ["foreign.xplane.pb"]:
        (tmp_path / words[0]).write_text("something else")
    assert main(["profile", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
