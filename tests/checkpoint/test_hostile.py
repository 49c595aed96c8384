"""300 hostile checkpoints and safetensors files: none hangs, crashes, is believed, or touches what lies elsewhere."""

import json
import os
import select
import subprocess
import sys
from collections import Counter

import pytest

import jaxshard as js
from tests.checkpoint import hostile
from tests.checkpoint.small import at, layout

LIMIT = 60.0
"""Seconds in which one case has to be done, on a machine where many others compute."""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    for step in (10, 20):
        js.save(folder / "run", at(step), layout())
    js.save_safetensors(folder / "model.safetensors", at(0), layout())
    return folder


def open_all(folder, count, log):
    """Open the cases in a process; start another after a case that crashed or hung; what came of each case."""
    outcomes, begun = {}, 0
    while len(outcomes) < count:
        command = [sys.executable, "-m", "tests.checkpoint.hostile", str(folder), str(len(outcomes)), str(count)]
        with (
            log.open("ab") as errors,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            ) as process,
        ):
            for line in lines_of(process, LIMIT):
                if line.startswith("begin"):
                    begun = int(line.split()[1])
                else:
                    number, done = json.loads(line)
                    outcomes[number] = done
            if len(outcomes) < count:
                hung = process.poll() is None
                process.kill()
                process.wait()
                outcomes[begun] = ["WRONG it hangs" if hung else f"WRONG it ends the process: {process.returncode}"]
    return outcomes


def lines_of(process, limit):
    """The lines that a process prints, until it ends or prints none for so many seconds."""
    rest = b""
    while select.select([process.stdout], [], [], limit)[0]:
        more = os.read(process.stdout.fileno(), 1 << 16)
        if not more:
            process.wait(limit)
            return
        *whole, rest = (rest + more).split(b"\n")
        yield from (line.decode() for line in whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_300_hostile_files(seed, good, tmp_path):
    count = 300
    kinds = {number: hostile.make_case(tmp_path / str(number), good, number, seed) for number in range(count)}
    outcomes = open_all(tmp_path, count, tmp_path / "errors.txt")
    wrong = [
        f"{number} ({kinds[number]}): {one}" for number, done in outcomes.items() for one in done if "WRONG" in one
    ]
    assert not wrong, "\n".join(wrong)
    assert len(outcomes) == count and len(set(kinds.values())) > 20
    refused = Counter(done[0] for done in outcomes.values())
    assert refused["refused"] > count * 3 // 4, refused  # the rest are changes that mean nothing
