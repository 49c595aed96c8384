"""`jaxshard train --bad-steps` and `--ordered`, with a learning rate that makes every step but the first one bad."""

import json
import re

import numpy as np
import pytest

from jaxshard.commands.main import main
from tests.toys import quick_compile

TINY = ["train", "--batch", "8", "--seq", "8", "--sample", "0", "--devices", "8", "--strategy", "zero2"]
WILD = ["--lr", "1e38", "--steps", "4", "--eval-every", "100"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(file, np.random.default_rng(0).integers(0, 32, 5000, np.uint8))
    return ["--data", str(file), "--vocab", "32"]


@pytest.mark.slow
def test_a_bad_step_ends_the_training_with_one_line(data, capsys):
    with quick_compile():
        assert main([*TINY, *WILD, *data]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("jaxshard: step 2 is bad: loss ") and lines[-1].endswith("; see --bad-steps")
    assert "Traceback" not in "".join(lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bad-steps", "rollback"], "--bad-steps rollback goes back to a saved run: add --checkpoint DIR"),
        (
            ["--bad-steps", "rollback", "--checkpoint", "run", "--sync-every", "4"],
            "--bad-steps rollback leaves out steps, also those after which --sync-every synchronises; use skip",
        ),
        (["--ordered", "--engine", "auto"], "--ordered: only the engine explicit adds in one order, not auto"),
        (["--ordered", "--mesh", "data=4,pipe=2"], "--ordered: only the engine explicit .*, not pipelined"),
        (
            ["--ordered", "--mesh", "data=4,tensor=2"],
            "weights used split over .*tensor.*, whose sums the compiler orders",
        ),
    ],
)
def test_flags_that_do_not_go_together(flags, message, data, capsys):
    assert main([*TINY, *flags, *data]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
def test_skipped_steps_are_told(data, tmp_path, capsys):
    file, log = tmp_path / "result.json", tmp_path / "log.jsonl"
    assert main([*TINY, *WILD, *data, "--bad-steps", "skip", "--json", str(file), "--log", str(log)]) == 0
    result = json.loads(file.read_text())
    assert result["bad_steps"] == [2, 3, 4] and len(result["losses"]) == 4
    assert [json.loads(line)["bad"] for line in log.read_text().splitlines()] == [0, 1, 1, 1]
    assert "bad steps" in capsys.readouterr().out


@pytest.mark.slow
def test_rollback_gives_up_where_every_step_spoils_the_run(data, tmp_path, capsys):
    """Each step from the saved one on is left out in turn, until it has gone back to it five times."""
    flags = ["--bad-steps", "rollback", "--checkpoint", str(tmp_path / "run"), "--checkpoint-every", "100"]
    assert main([*TINY, *WILD, *data, *flags, "--steps", "20"]) == 1
    assert "after 5 returns to step 0" in capsys.readouterr().err


@pytest.mark.slow
def test_ordered_training_says_so_and_learns_the_same(data, tmp_path):
    found = []
    for flags in ([], ["--ordered"]):
        file = tmp_path / f"{len(flags)}.json"
        assert main([*TINY, *data, "--steps", "3", *flags, "--json", str(file)]) == 0
        found.append(json.loads(file.read_text()))
    native, ordered = found
    assert (native["reduction"], ordered["reduction"]) == ("native", "ordered")
    assert ordered["losses"] == pytest.approx(native["losses"], rel=1e-5)
    assert ordered["loss_eval"] == pytest.approx(native["loss_eval"], rel=1e-5)
    assert {row["kind"] for row in ordered["collectives"]} == {"all-to-all", "all-gather"}
