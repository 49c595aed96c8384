"""docs/guides/clusters/slurm.sbatch in a real Slurm: a job that ends early goes on as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

import jaxshard as js
from tests.distributed.killing import losses
from tests.distributed.slurm import Slurm, missing, start_slurm

pytestmark = [
    pytest.mark.slow(sampled=False),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces of Linux"),
]

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "docs" / "guides" / "clusters" / "slurm.sbatch"
TRAINING = """--seq 16 --batch 4 --devices 2 --change depth=1,width=16,heads=2 --sample 0 \\
    --eval-every 100000 --decay constant --steps "$(cat "$RUN/steps")" """
MANY = 1_000_000
"""More steps than are taken before a job is interrupted."""
STEPS = 100
"""Steps of a run in all, where it is interrupted soon after its first checkpoint."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    running = start_slurm(tmp_path_factory.mktemp("slurm"))
    yield running
    running.program.kill()
    running.program.wait()


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The page's file, with a small model on CPUs."""
    folder = tmp_path_factory.mktemp("script")
    text, file = folder / "text.txt", folder / "slurm.sbatch"
    text.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(300)))
    content = SBATCH.read_text()
    for old, new in (
        ("#SBATCH --gpus-per-node=8", "# no GPUs:"),
        ('--model gpt2 --data "$HOME/data/text"', f"--model gpt-1m --data {text} {TRAINING}"),
        ("--checkpoint-every 500", "--checkpoint-every 10"),
    ):
        assert content.count(old) == 1
        content = content.replace(old, new)
    file.write_text(content)
    return file


class Job(NamedTuple):
    """A job of Slurm and the folder of its run."""

    slurm: Slurm
    id: str
    run: Path

    @property
    def checkpoints(self):
        return self.run / "checkpoints"

    @property
    def nodes(self):
        """The names of its nodes; the batch script and process 0 run on the first of them."""
        return self.slurm.run("scontrol", "show", "hostnames", self.slurm.facts(self.id)["NodeList"]).split()

    @property
    def processes(self):
        """{node: process id} of the training processes."""
        listed = subprocess.run(["pgrep", "-f", f"jaxshard train .*{self.run}"], capture_output=True, text=True).stdout
        found = {}
        for process in (Path("/proc") / pid for pid in listed.split()):
            try:
                program, environment = os.readlink(process / "exe"), (process / "environ").read_text()
            except OSError:  # it has ended since
                continue
            if "python" in program:
                found[re.search(r"SLURMD_NODENAME=(\w+)", environment)[1]] = int(process.name)
        return found

    def wait_for(self, **wanted):
        self.slurm.wait_for(self.id, **wanted)

    def wait_for_checkpoint(self):
        end = time.monotonic() + 300
        while not js.latest_step(self.checkpoints):
            assert time.monotonic() < end, self.slurm.output(self.id)
            time.sleep(0.2)


def submit_job(slurm, script, run, steps, *flags, **environment):
    """Submit the file; each start of the job trains up to the step in a file of its folder."""
    run.mkdir(exist_ok=True)
    (run / "steps").write_text(str(steps))
    environment |= {
        "RUN": str(run), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    fits = ["--ntasks-per-node=1", "--cpus-per-task=1"]
    return Job(slurm, slurm.run("sbatch", "--parsable", *fits, *flags, str(script), **environment).strip(), run)


@pytest.fixture
def submit(slurm, script, tmp_path):
    """Submit the file with a run of this test; at the end no job and no loss of a node is left."""

    def submitted(steps, *flags, **environment):
        return submit_job(slurm, script, tmp_path / "run", steps, *flags, **environment)

    yield submitted
    slurm.run("scancel", "--user=root")
    slurm.repair()


@pytest.fixture(scope="module")
def undisturbed(slurm, script, tmp_path_factory):
    """Return the folder of a run to which nothing happens, of so many steps."""
    runs = {}

    def trained(steps):
        if steps not in runs:
            job = submit_job(slurm, script, tmp_path_factory.mktemp("undisturbed") / "run", steps)
            job.wait_for(JobState="COMPLETED", Restarts="0", ExitCode="0:0")
            assert not (job.run / "ended_early").exists()
            runs[steps] = job.run
        return runs[steps]

    return trained


def saved_arrays(folder):
    """{name: array} of a step, read by Orbax."""
    import orbax.checkpoint as ocp

    reader, state = ocp.PyTreeCheckpointer(), folder / "arrays" / "state"
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(state).item_metadata.tree)
    return reader.restore(state, restore_args=args)


def check_goes_on(job, steps, undisturbed, **wanted):
    """Check that a job goes on from its newest complete step, and ends with the numbers of a run left alone."""
    newest = js.latest_step(job.checkpoints, intact=True)
    assert 0 < newest < steps
    job.wait_for(JobState="COMPLETED", **wanted)
    assert f"goes on from step {newest}" in job.slurm.output(job.id)
    assert js.latest_step(job.checkpoints, intact=True) == steps
    taken, expected = losses(job.run / "log.jsonl"), dict(losses(undisturbed(steps) / "log.jsonl"))
    assert {step for step, _ in taken} == set(range(1, steps + 1))
    assert all(loss == expected[step] for step, loss in taken)
    mine, theirs = (saved_arrays(run / "checkpoints" / str(steps)) for run in (job.run, undisturbed(steps)))
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def requeue(job):
    job.slurm.run("scontrol", "requeue", job.id)


def kill_first_process(job):
    os.kill(job.processes[job.nodes[0]], signal.SIGKILL)


def kill_last_process(job):
    os.kill(job.processes[job.nodes[-1]], signal.SIGKILL)


def kill_slurmstepd(job):
    task = job.processes[job.nodes[-1]]
    parent = int(Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[1])
    assert "slurmstepd" in Path(f"/proc/{parent}/cmdline").read_text()
    os.kill(parent, signal.SIGKILL)
    os.kill(task, signal.SIGKILL)


def lose_first_node(job):
    job.slurm.lose(job.nodes[0])


def lose_last_node(job):
    job.slurm.lose(job.nodes[-1])


@pytest.mark.parametrize(
    "disturb", [requeue, kill_first_process, kill_last_process, kill_slurmstepd, lose_first_node, lose_last_node]
)
def test_a_job_goes_on(disturb, submit, undisturbed):
    job = submit(MANY)
    job.wait_for_checkpoint()
    disturb(job)
    job.wait_for(JobState="PENDING", Restarts="1")
    (job.run / "steps").write_text(str(STEPS))
    check_goes_on(job, STEPS, undisturbed, Restarts="1")


def test_a_job_that_runs_out_of_time_goes_on(submit, undisturbed):
    job = submit(MANY, "--time=3", "--signal=B:USR1@60")  # Slurm tells it one to two minutes before the limit
    job.wait_for(JobState="PENDING", Restarts="1")
    newest = js.latest_step(job.checkpoints)
    (job.run / "steps").write_text(str(newest + 25))
    assert f"stopped by SIGTERM after step {newest} of {MANY}" in job.slurm.output(job.id), "nothing was lost"
    check_goes_on(job, newest + 25, undisturbed, Restarts="1")
    assert len((job.run / "ended_early").read_text().splitlines()) == 1


def test_scancel_ends_a_job_for_good_and_another_goes_on(submit, undisturbed):
    job = submit(MANY)
    job.wait_for_checkpoint()
    job.slurm.run("scancel", job.id)
    job.wait_for(JobState="CANCELLED")
    time.sleep(8)  # a job that queues again would be back by now
    job.wait_for(JobState="CANCELLED", Restarts="0")
    assert not job.processes
    check_goes_on(submit(STEPS), STEPS, undisturbed, Restarts="0")


def test_a_job_whose_flags_are_wrong_ends(submit):
    job = submit(-1)
    job.wait_for(JobState="FAILED", Restarts="0", ExitCode="2:0")
    assert not (job.run / "ended_early").exists()


def test_a_job_that_never_gets_to_a_checkpoint_ends(submit):
    job = submit(MANY, XLA_FLAGS="--no_such_flag", FAILURES="2")
    job.wait_for(JobState="FAILED", Restarts="1")
    assert len((job.run / "ended_early").read_text().splitlines()) == 2
