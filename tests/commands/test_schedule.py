"""`jaxshard schedule`: the figures of named schedules and of files, and what is refused."""

import json
import sys

import pytest

from jaxshard.commands.main import main
from jaxshard.schedules import interleaved, named

SIZES = ["--stages", "4", "--microbatches", "16"]


def result_of(capsys, *args):
    assert main(["schedule", *args, "--json", "-"]) == 0
    output = capsys.readouterr()
    return json.loads(output.out), output.err


@pytest.mark.parametrize(
    ("args", "bubble", "bubble_async", "stash", "ticks"),
    [
        (["gpipe"], 3 / 19, 3 / 19, [16] * 4, 38),
        (["1f1b"], 3 / 19, 3 / 19, [10, 8, 6, 4], 25),
        (["interleaved"], 3 / 35, 3 / 35, [14, 12, 10, 8], 45),
        (["interleaved", "--chunks", "4"], 3 / 67, 3 / 67, [22, 20, 18, 16], 85),
        (["zero_bubble"], 1 / 17, 1 / 33, [14, 13, 12, 11], 45),
        (["zero-bubble", "--chunks", "4"], 1 / 33, 1 / 65, [22, 21, 20, 19], 85),
    ],
)
def test_figures_of_the_named_schedules(args, bubble, bubble_async, stash, ticks, capsys):
    result, shown = result_of(capsys, *args, *SIZES)
    assert result["bubble"] == pytest.approx(bubble) and result["bubble_async"] == pytest.approx(bubble_async)
    assert result["peak_stash"] == stash and result["ticks"] == ticks and result["head_runs"] == 4
    assert result["costs"] == {"F": 1, "B": 2} and (result["stages"], result["microbatches"]) == (4, 16)
    schedule = named(args[0], 4, 16, chunks=result["chunks"])
    assert result["name"] == schedule.name
    rows = [tuple(row[column] for column in ("tick", "device", "op", "chunk", "microbatch")) for row in result["table"]]
    assert rows == list(schedule.ops)
    assert str(schedule) in shown
    assert f"bubble      {bubble:.4f} in lockstep, {bubble_async:.4f} asynchronously" in shown
    assert f"stash       {' '.join(map(str, stash))} pairs of chunk and micro-batch" in shown


def test_a_file_is_shown_like_a_name_and_json_goes_to_a_file(tmp_path, capsys):
    table, out = tmp_path / "mine.csv", tmp_path / "out.json"
    schedule = interleaved(2, 4)
    schedule.to_csv(table)
    expected, _ = result_of(capsys, "interleaved", "--stages", "2", "--microbatches", "4")
    assert result_of(capsys, str(table))[0] == expected
    bare = tmp_path / "bare"
    bare.write_text(table.read_text().partition("\n")[2])
    assert main(["schedule", str(bare), "--stages", "2", "--chunks", "2", "--json", str(out)]) == 0
    assert json.loads(out.read_text()) == expected | {"name": "bare"}
    assert capsys.readouterr().out.startswith("bare: 2 stages of 2 chunks each, 4 micro-batches")


def test_without_matplotlib_the_table_is_printed_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["schedule", "gpipe", *SIZES, "--plot", str(tmp_path / "a.svg")]) == 2
    output = capsys.readouterr()
    assert output.out.startswith("gpipe: ") and "bubble" in output.out
    assert output.err == "jaxshard: pictures need matplotlib: pip install matplotlib (the extra viz)\n"


def test_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["schedule", "gpipe", *SIZES, "--plot", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    capsys.readouterr()
    assert main(["schedule", "gpipe", *SIZES, "--plot", str(tmp_path / "a.xyz")]) == 2
    assert "a.xyz: pictures are written as .png, .svg, .pdf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["gpipe"], "the schedule gpipe needs --stages and --microbatches, such as --stages 4 --microbatches 16"),
        (["pipe", *SIZES], "there is no schedule 'pipe'; use one of gpipe, one_f_one_b, interleaved, zero_bubble"),
        (["gpipe", *SIZES, "--chunks", "2"], "gpipe has 1 chunk per device, got 2; leave chunks out, or use"),
        (["1f1b", "--stages", "4", "--microbatches", "3"], "3 micro-batches over 4 stages are too few"),
        (["none.csv"], "none.csv: there is no such file; give the path of a CSV file, or one of gpipe, one_f_one_b,"),
        (["mine.csv", "--stages", "3"], "stages 3: mine.csv is a table for stages=1; leave stages out"),
        (["bad.csv"], "bad.csv is no schedule: - line 4: F of micro-batch 0, chunk 0, device 0 at tick 1 is doubled"),
        (["gpipe", *SIZES, "--plot", "no/a.png"], "--plot no/a.png: the folder no does not exist"),
    ],
)
def test_what_is_refused(args, error, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = "tick,device,op,chunk,microbatch\n0,0,F,0,0\n0,0,B,0,0\n"
    (tmp_path / "mine.csv").write_text(small)
    (tmp_path / "bad.csv").write_text(small + "1,0,F,0,0\n")
    assert main(["schedule", *args]) == 2
    output = capsys.readouterr()
    assert not output.out and output.err.startswith("jaxshard: ") and len(output.err.splitlines()) == 1
    assert error in output.err
