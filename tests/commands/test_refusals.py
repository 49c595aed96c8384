"""Values of flags that can't be meant: one line that says what to do, status 2, and nothing done."""

import re
from pathlib import Path

import pytest

import jaxshard as js
from jaxshard.commands import devices
from jaxshard.commands.main import main

REFUSED = {
    "schedule one_f_one_b --stages 4 --microbatches 99999999999999999999": "--microbatches 9+: give a number above 0",
    "schedule one_f_one_b --stages 4 --microbatches 9999999999": "39999999996 forwards.*take fewer micro-batches",
    "train --lr nan": "--lr nan: give a number above 0",
    "train --lr inf": "--lr inf: give a number above 0 and below",
    "train --patience 0": "--patience 0: give a number above 0",
    "train --seed -1": r"--seed -1: give a number from 0 to 2\*\*63 - 1",
    "train --seed 9223372036854775808": r"--seed 9223372036854775808: give a number from 0 to 2\*\*63 - 1",
    "parity gpt-1m --seed -3": "--seed -3: give a number from 0",
    "train --data=": "--data '' is empty: give a value, or leave the flag out",
    "train --data x.bin --vocab 3 --dtype S": "--dtype S: token ids are integers; use one such as uint16",
    "train --data x.bin --vocab 3 --dtype i4,,": "--dtype i4,,: there is no such dtype; use one such as uint16",
    "train --data x.bin --vocab 3 --dtype float32": "--dtype float32: token ids are integers",
    "train --checkpoint gs://bucket/run": "gs:/bucket/run: checkpoints lie in a folder of a file system",
    "audit gpt-1m --topology=": "topology ''",
    "launch -n 2 --grace nan -- true": "--grace nan: give a number above 0",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_value_that_can_not_be_meant_is_refused_in_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxshard: ") and re.search(REFUSED[words], line)
    assert list(Path().iterdir()) == []


def test_more_devices_than_can_be_simulated(monkeypatch):
    monkeypatch.setattr(devices, "backend_is_initialized", lambda: False)
    with pytest.raises(ValueError, match="--devices 99999999999: at most 4096 devices can be simulated"):
        devices.choose_devices(99999999999)


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxshard {js.__version__}\n"
