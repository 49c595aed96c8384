"""`jaxshard train` in several processes: the batches and losses of one process, and one voice."""

import json
import os
import subprocess
import sys

import pytest

from jaxshard.commands.main import main
from tests.distributed.killing import losses

FLAGS = ["train", "--seq", "16", "--batch", "16", "--steps", "3", "--eval-every", "3"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(300)))
    return file


def launched(count, *flags, quick=True):
    """What a run by several processes printed."""
    command = [sys.executable, "-m", "jaxshard"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | ({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if quick else {})
    done = subprocess.run(
        [*command, "launch", "-n", str(count), "--", *command, *map(str, flags)],
        capture_output=True, text=True, timeout=280, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_same(one, several):
    """Losses, held-out ones included, within 1e-6 relative; the same text is drawn from the model."""
    for name in ("losses", "loss_eval"):
        assert several[name] == pytest.approx(one[name], rel=1e-6, abs=0)
    for name in ("sample", "collectives"):
        assert several[name] == one[name]
    assert several["bytes_per_device"]["predicted"] == one["bytes_per_device"]["predicted"]


@pytest.mark.slow
def test_two_processes_of_four_devices_train_like_one_of_eight(text, tmp_path):
    """Losses within 1e-6."""
    flags = [*FLAGS, "--data", text, "--sample", "3"]
    files = ["--json", tmp_path / "2.json", "--log", tmp_path / "2.log"]
    out = launched(2, *flags, *files)
    assert main([*map(str, flags), "--json", str(tmp_path / "1.json")]) == 0
    assert_same(*(json.loads((tmp_path / f"{count}.json").read_text()) for count in (1, 2)))
    assert [step for step, _ in losses(tmp_path / "2.log")] == [1, 2, 3], "one process writes"
    assert "8 simulated CPU devices in 2 processes" in out
    # Gloo writes into the lines of others, and of its own.
    assert not [line for line in out.splitlines() if line.startswith("[1]") and ("loss" in line or "step" in line)]


@pytest.mark.slow
def test_what_the_processes_cant_share_is_refused_by_all():
    command = [sys.executable, "-m", "jaxshard"]
    done = subprocess.run(
        [*command, "launch", "-n", "2", "--max-restarts", "3", "--", *command, "train", "--devices", "3"],
        capture_output=True, text=True, timeout=120, env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 2 and "starting all again" not in done.stderr
    assert "--devices 3 can't be divided over 2 processes; give --devices a multiple of 2" in done.stderr


MESHES = {
    "fsdp": [],
    "zero1": ["--strategy", "zero1", "--microbatches", "2"],
    "auto": ["--engine", "auto"],
    "pipeline": ["--mesh", "data=2,tensor=2,pipe=2"],
    "pipeline across processes": ["--mesh", "pipe=4,data=2"],
}


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """The results of one process with eight devices, made once for every mesh."""
    folder = tmp_path_factory.mktemp("alone")

    def made(mesh):
        file = folder / f"{mesh}.json"
        if not file.exists():
            launched(1, *FLAGS, "--data", text, "--sample", "3", *MESHES[mesh], "--json", file, quick=False)
        return json.loads(file.read_text())

    return made


@pytest.mark.slow(sampled=False)  # minutes each
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("count", [2, 4])
def test_processes_and_devices(count, mesh, text, tmp_path, alone):
    """Losses within 1e-6."""
    file = tmp_path / "several.json"
    launched(count, *FLAGS, "--data", text, "--sample", "3", *MESHES[mesh], "--json", file, quick=False)
    assert_same(alone(mesh), json.loads(file.read_text()))
