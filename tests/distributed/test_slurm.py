"""docs/guides/clusters/slurm.sbatch in a real Slurm: jobs that are cancelled, killed and out of time."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jaxshard as js
from tests.distributed.killing import losses
from tests.distributed.slurm import missing, start_slurm

pytestmark = [
    pytest.mark.slow(sampled=False),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces of Linux"),
]

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "docs" / "guides" / "clusters" / "slurm.sbatch"
TRAINING = """--seq 16 --batch 4 --devices 2 --change depth=1,width=16,heads=2 --sample 0 \\
    --eval-every 100000 --steps "$(cat "$RUN/steps")" """
MANY = 1_000_000
"""More steps than are taken before a job is interrupted."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    running = start_slurm(tmp_path_factory.mktemp("slurm"))
    yield running
    running.program.kill()
    running.program.wait()


@pytest.fixture
def submit(slurm, tmp_path):
    """Submit the page's file with a small model on CPUs; return the job's id and its folder."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(300)))
    script = SBATCH.read_text()
    for old, new in (
        ("#SBATCH --gpus-per-node=8", "# no GPUs:"),
        ('--model gpt2 --data "$HOME/data/text"', f"--model gpt-1m --data {text} {TRAINING}"),
        ("--checkpoint-every 500", "--checkpoint-every 10"),
    ):
        assert script.count(old) == 1
        script = script.replace(old, new)
    file = tmp_path / "slurm.sbatch"
    file.write_text(script)

    def submitted(steps, *flags):
        run = tmp_path / "run"
        run.mkdir(exist_ok=True)
        (run / "steps").write_text(str(steps))
        environment = {
            "RUN": str(run), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        fits = ["--ntasks-per-node=1", "--cpus-per-task=1"]
        return slurm.run("sbatch", "--parsable", *fits, *flags, str(file), **environment).strip(), run

    return submitted


def tasks(run):
    """The process ids of the training processes of a run."""
    found = subprocess.run(["pgrep", "-f", f"jaxshard train .*{run}"], capture_output=True, text=True).stdout
    pids = [int(pid) for pid in found.split()]
    return [pid for pid in pids if "python" in os.path.realpath(f"/proc/{pid}/exe")]


def wait_for_step(slurm, job, run, after=0):
    """Return the newest step once it is above `after`."""
    end = time.monotonic() + 300
    while (step := js.latest_step(run / "checkpoints") or 0) <= after:
        assert time.monotonic() < end, slurm.output(job)
        time.sleep(0.2)
    return step


def test_a_job_that_is_killed_and_runs_out_of_time_goes_on(slurm, submit):
    job, run = submit(MANY, "--time=3", "--signal=B:USR1@60")
    saved = wait_for_step(slurm, job, run)
    os.kill(tasks(run)[-1], signal.SIGKILL)
    slurm.wait_for(job, Restarts="1")
    # The second start is told to save one to two minutes before its limit of three.
    slurm.wait_for(job, JobState="RUNNING", Restarts="1")
    later = wait_for_step(slurm, job, run, saved)
    slurm.wait_for(job, Restarts="2")
    last = wait_for_step(slurm, job, run, later)
    (run / "steps").write_text(str(last + 25))
    slurm.wait_for(job, JobState="COMPLETED", Restarts="2")
    assert js.latest_step(run / "checkpoints", intact=True) == last + 25
    assert len((run / "ended_early").read_text().splitlines()) == 2
    taken = losses(run / "log.jsonl")
    assert all(dict(taken)[step] == loss for step, loss in taken), "a step that was taken again has the same loss"


def test_scancel_ends_a_job_for_good(slurm, submit):
    job, run = submit(MANY)
    wait_for_step(slurm, job, run)
    slurm.run("scancel", job)
    slurm.wait_for(job, JobState="CANCELLED")
    time.sleep(8)  # a job that queues again would be back by now
    assert slurm.facts(job)["JobState"] == "CANCELLED" and slurm.facts(job)["Restarts"] == "0"
    assert not tasks(run)


def test_a_job_whose_flags_are_wrong_ends(slurm, submit):
    job, run = submit(-1)
    slurm.wait_for(job, JobState="FAILED", Restarts="0", ExitCode="2:0")
    assert not (run / "ended_early").exists()


def test_a_job_goes_on_where_slurms_process_on_a_node_was_killed(slurm, submit):
    job, run = submit(MANY)
    saved = wait_for_step(slurm, job, run)
    task = tasks(run)[-1]
    parent = int(Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[1])
    assert "slurmstepd" in Path(f"/proc/{parent}/cmdline").read_text()
    os.kill(parent, signal.SIGKILL)
    os.kill(task, signal.SIGKILL)
    slurm.wait_for(job, Restarts="1")
    wait_for_step(slurm, job, run, saved)
    slurm.run("scancel", job)
