"""`jaxshard train` in several processes: the batches and losses of one process, and one voice."""

import json
import os
import subprocess
import sys

import pytest

from jaxshard.commands.main import main
from tests.distributed.killing import losses

COMMAND = [sys.executable, "-m", "jaxshard"]
QUICK = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def launched(count, *words):
    """Run `jaxshard train` in so many processes."""
    command = [*COMMAND, "launch", "-n", str(count), *words[: words.index("train")], "--", *COMMAND, "train"]
    command += words[words.index("train") + 1 :]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=280, env=QUICK)


@pytest.mark.slow
def test_two_processes_of_four_devices_train_like_one_of_eight(tmp_path):
    """Losses, held-out ones included, within 1e-6 relative; the same text is drawn from the model."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(300)))
    flags = ["train", "--seq", 16, "--batch", 16, "--steps", 3, "--eval-every", 3, "--data", text, "--sample", 3]
    done = launched(2, *flags, "--json", tmp_path / "2.json", "--log", tmp_path / "2.log")
    assert done.returncode == 0, done.stdout + done.stderr
    assert main([*map(str, flags), "--json", str(tmp_path / "1.json")]) == 0
    one, two = (json.loads((tmp_path / f"{count}.json").read_text()) for count in (1, 2))
    assert all(two[name] == pytest.approx(one[name], rel=1e-6, abs=0) for name in ("losses", "loss_eval"))
    assert all(two[name] == one[name] for name in ("sample", "collectives"))
    assert two["bytes_per_device"]["predicted"] == one["bytes_per_device"]["predicted"]
    assert [step for step, _ in losses(tmp_path / "2.log")] == [1, 2, 3], "one process writes"
    assert "8 simulated CPU devices in 2 processes" in done.stdout
    # Gloo writes into the lines of others, and of its own.
    lines = [line for line in done.stdout.splitlines() if line.startswith("[1]")]
    assert not [line for line in lines if "loss" in line or "step" in line]


@pytest.mark.slow
def test_what_the_processes_cant_share_is_refused_by_all():
    done = launched(2, "--max-restarts", "3", "train", "--devices", "3")
    assert done.returncode == 2 and "starting all again" not in done.stderr
    assert "--devices 3 can't be divided over 2 processes; give --devices a multiple of 2" in done.stderr
