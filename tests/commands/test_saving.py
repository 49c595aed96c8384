"""`jaxshard train --checkpoint --resume`: what is saved, from where a run goes on, and what is refused."""

import json
import shutil

import numpy as np
import pytest

import jaxshard as js
from jaxshard.checkpoint.reader import describe
from jaxshard.commands.flags import Saving as SavingFlags
from jaxshard.commands.main import main
from jaxshard.commands.saving import compare_facts, make_saving
from tests.checkpoint.small import at, layout

FACTS = {"model": "m", "batch": 8, "seq": 4, "seed": 0, "corpus": "c", "steps": 9, "lr": 0.1}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains three steps on a small corpus, with more flags; the status."""
    corpus = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(corpus, np.random.default_rng(0).integers(0, 32, 2000, np.uint8))
    flags = ["--data", str(corpus), "--vocab", "32", "--batch", "8", "--seq", "16", "--sample", "0", "--devices", "8"]
    flags += ["--change", "depth=1,width=32,heads=4"]
    return lambda *more: main(["train", *flags, "--steps", "3", *more])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, train):
    """(folder of steps 2 and 3, result): three steps without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    file = folder / "whole.json"
    assert train("--checkpoint", str(folder / "run"), "--checkpoint-every", "2", "--json", str(file)) == 0
    return folder / "run", json.loads(file.read_text())


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the steps."""
    return shutil.copytree(whole[0], tmp_path / "run")


@pytest.mark.slow
def test_every_so_many_steps_and_the_last_one_are_saved(whole):
    assert sorted(path.name for path in whole[0].iterdir() if path.name[0] != ".") == ["2", "3"]
    assert whole[1]["start"] == 0 and len(whole[1]["losses"]) == 3
    assert describe(whole[0]).data["batch"] == 8
    assert main(["checkpoint", "verify", str(whole[0])]) == 0


@pytest.mark.slow
def test_a_damaged_step_is_refused_and_with_fall_back_the_losses_are_those_of_the_whole_run(
    whole, folder, train, capsys
):
    """Bit for bit, and the damaged step is replaced."""
    file = max((folder / "3" / "arrays").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert train("--checkpoint", str(folder), "--resume") == 2
    error = capsys.readouterr().err
    assert str(file) in error and "--fall-back goes on from the newest step that is intact" in error

    result = folder.parent / "result.json"
    assert train("--checkpoint", str(folder), "--resume", "--fall-back", "--json", str(result)) == 0
    found = json.loads(result.read_text())
    assert "goes on from step 2; step 3 is damaged and will be replaced" in capsys.readouterr().out
    assert found["start"] == 2 and found["losses"] == whole[1]["losses"][2:]
    assert found["loss_eval"] == whole[1]["loss_eval"]
    assert main(["checkpoint", "verify", str(folder)]) == 0


@pytest.mark.slow
def test_a_run_that_is_complete_takes_no_step(folder, train, capsys):
    result = folder.parent / "result.json"
    assert train("--checkpoint", str(folder), "--resume", "--json", str(result)) == 0
    assert json.loads(result.read_text())["losses"] == [] and "3 of 3 steps are done" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "1"], "has --seed 0, now it is 1: it would see other batches"),
        (["--data", __file__, "--vocab", "256"], "has --data tokens.npy"),
        (["--model", "llama-1m"], "has --model gpt-1m (depth=1,width=32,heads=4), now it is llama-1m"),
    ],
)
def test_other_batches_are_refused(whole, train, capsys, flags, message):
    assert train("--checkpoint", str(whole[0]), "--resume", *flags) == 2
    assert message in capsys.readouterr().err


def test_facts_that_decide_batches_are_the_same_and_others_may_change():
    """A run that is resumed, from a checkpoint or from memory, sees the same batches."""
    assert compare_facts(FACTS, FACTS, "the run") == []
    notes = compare_facts(FACTS, FACTS | {"steps": 7, "clip": 1.0}, "the run")
    assert notes == ["the run so far had --steps 9, now it is 7: the learning rate changes"]  # it had no clip
    for name, flag in {"batch": "--batch", "seq": "--seq", "seed": "--seed", "corpus": "--data"}.items():
        with pytest.raises(ValueError, match=f"the run has {flag} .*, now it is other: it would see other batches"):
            compare_facts(FACTS, FACTS | {name: "other"}, "the run")


def test_factors_are_the_same_and_told_by_their_own_flag():
    tuned = FACTS | {"model": "hf:m --lora rank=8,alpha=16"}
    assert compare_facts(tuned, tuned, "the run") == []
    for other, shown in (("hf:m --lora rank=8,alpha=32", "rank=8,alpha=32"), ("hf:m", "none")):
        with pytest.raises(ValueError, match=f"the run has --lora rank=8,alpha=16, now it is {shown}: .*same --lora"):
            compare_facts(tuned, FACTS | {"model": other}, "the run")


def test_a_checkpoint_of_another_program_is_refused(tmp_path):
    js.save(tmp_path, at(1), layout())
    with pytest.raises(ValueError, match="was not saved by jaxshard train"):
        make_saving(SavingFlags(checkpoint=tmp_path, resume=True)).begin(layout(), FACTS)


def test_a_file_is_no_folder_and_what_the_command_writes_itself_may_lie_in_it(tmp_path):
    log = tmp_path / "run" / "log.jsonl"
    log.parent.mkdir()
    log.write_text("")
    assert make_saving(SavingFlags(checkpoint=log.parent, resume=True), others=(log,)).resumed is None
    with pytest.raises(NotADirectoryError, match="that is a file, not a folder of checkpoints"):
        make_saving(SavingFlags(checkpoint=log))


@pytest.mark.parametrize("name", ["absent", "empty", "incomplete"])
def test_without_a_step_a_run_starts_at_0(tmp_path, name):
    folder = tmp_path / name
    if name != "absent":
        folder.mkdir()
    if name == "incomplete":
        (folder / "4").mkdir()
    saves = make_saving(SavingFlags(checkpoint=folder, resume=True, fall_back=True))
    begin = saves.begin(layout(), FACTS)
    begin.saver.__exit__(None, None, None)
    assert saves.resumed is None and saves.intervals == (10,) and begin.run is None
    assert "; new" in begin.shown["checkpoint"]
    assert ("step 4 is incomplete and will be replaced" in begin.shown["checkpoint"]) == (name == "incomplete")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"resume": True}, "--resume needs a folder: add --checkpoint DIR"),
        ({"checkpoint_every": 3}, "--checkpoint-every 3 needs a folder"),
        ({"keep": 2}, "--keep 2 needs a folder"),
        ({"fall_back": True, "checkpoint": "new"}, "--fall-back chooses the step to go on from: add --resume"),
        ({"checkpoint": "run/3"}, "is the folder of one step; give .*run and step=3"),
        ({"checkpoint": "other"}, "is not a folder of checkpoints: it holds notes.txt and no step"),
        ({"checkpoint": "run"}, "a run is there, saved at step 3; add --resume to go on with it"),
        ({"checkpoint": "spoiled", "resume": True, "fall_back": True}, "is intact, the newest is 3"),
    ],
)
def test_wrong_flags(folder, flags, message):
    (folder.parent / "spoiled" / "3").mkdir(parents=True)
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "notes.txt").write_text("")
    (folder.parent / "spoiled" / "3" / "manifest.json").write_text("")
    given = flags | ({"checkpoint": folder.parent / flags["checkpoint"]} if "checkpoint" in flags else {})
    with pytest.raises(ValueError, match=message):
        make_saving(SavingFlags(**given))


def test_a_run_in_memory_is_one_of_the_same_training_and_as_new_as_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.delenv("JAXSHARD_MEMORY", raising=False)
    with pytest.raises(ValueError, match="--memory-every 1: nothing starts these processes again"):
        make_saving(SavingFlags(memory_every=1))
    monkeypatch.setenv("JAXSHARD_MEMORY", str(tmp_path / "memory"))
    saves = make_saving(SavingFlags(memory_every=1))
    saves.begin(layout(), FACTS).memory.save(at(4))
    begin = saves.begin(layout(), FACTS | {"lr": 0.2})
    assert begin.step == 4 and begin.notes == ["the run so far had --lr 0.1, now it is 0.2: the learning rate changes"]
    assert begin.shown["memory"].endswith("after every step; goes on from step 4")
    with pytest.raises(ValueError, match=r"--memory-every: the run in .* has --seed 0, now it is 1"):
        saves.begin(layout(), FACTS | {"seed": 1})
    js.save(tmp_path / "run", at(5), layout(), data=FACTS)
    newer = saves._replace(folder=tmp_path / "run", resumed=5).begin(layout(), FACTS)
    newer.saver.__exit__(None, None, None)
    assert newer.step == 5
