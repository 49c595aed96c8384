"""The files in docs/guides/clusters: they parse, their flags exist, their shells do what they say with stand-ins."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jax
import pytest
import yaml

from jaxshard.commands.main import main

FOLDER = Path(__file__).parents[2] / "docs" / "guides" / "clusters"
FILES = ["slurm.sbatch", "jobset.yaml", "tpu.sh", "README.md"]

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def jobset_command():
    """The shell in the JobSet."""
    lines = (FOLDER / "jobset.yaml").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip() == "- |") + 1
    indent = len(lines[start]) - len(lines[start].lstrip())
    body = [line for line in lines[start:] if len(line) - len(line.lstrip()) >= indent]
    return "\n".join(line[indent:] for line in body[: lines[start:].index("                  volumeMounts:")])


@pytest.mark.parametrize("name", ["slurm.sbatch", "tpu.sh"])
def test_the_scripts_parse(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_the_jobset_parses():
    jobset = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    host, _, port = environment["JAXSHARD_COORDINATOR_ADDRESS"].partition(":")
    assert host == f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
    assert int(port) == container["ports"][0]["containerPort"]
    assert int(environment["JAXSHARD_NUM_PROCESSES"]) == spec["parallelism"] == spec["completions"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in spec["template"]["spec"]["volumes"]
    }
    assert container["command"] == ["bash", "-c", jobset_command() + "\n"]


def read_by_schema(jobset):
    """Return {path: value} of the fields of a JobSet that the models of its authors' schema have."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="extra test")
    return fields(models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict())


def fields(tree):
    return {jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.slow
def test_the_jobset_has_only_fields_of_its_schema():
    jobset = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    assert fields(jobset).items() <= read_by_schema(jobset).items()


MISSPELT = ["maxRestarts", "replicas", "backoffLimit", "terminationGracePeriodSeconds", "containerPort", "readOnly"]
WRONG = ["maxRestarts: x", 'parallelism: "2"', "value: 2", "restartPolicy: Nevr", "emptyDir: Memory", "readOnly: 1"]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", MISSPELT)
def test_the_schema_knows_no_misspelt_field(wrong):
    text = (FOLDER / "jobset.yaml").read_text()
    jobset = yaml.safe_load(text.replace(f"{wrong}:", f"{wrong.lower()}s:"))
    assert fields(jobset).keys() - read_by_schema(jobset).keys(), wrong


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_the_schema_refuses_a_wrong_value(wrong):
    name, _, value = wrong.partition(": ")
    text = re.sub(rf"\b{name}:[^#\n]*(\n +medium: Memory)?", f"{name}: {value}", (FOLDER / "jobset.yaml").read_text())
    with pytest.raises(ValueError, match="validation error"):
        read_by_schema(yaml.safe_load(text))


@pytest.mark.parametrize("name", FILES)
def test_the_flags_exist(name, capsys):
    text = (FOLDER / name).read_text().replace("\\\n", " ")
    commands = re.findall(r"jaxshard (train|launch) ([^&`\n]*)", text)
    found = {flag for _, rest in commands for flag in re.findall(r"--[a-z][a-z-]*", rest)}
    known = set()
    for command in ("train", "launch"):
        main([command, "--help"])
        known |= set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    assert found and found <= known


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Makes programs on PATH from scripts; `calls` is what they wrote down."""
    folder = tmp_path / "bin"
    folder.mkdir()
    calls = tmp_path / "calls"

    def made(**scripts):
        for name, script in scripts.items():
            (folder / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {calls}\n{script}\n')
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return calls

    return made


SAVES = "trap 'sleep 0.2; exit 0' TERM; while true; do sleep 0.02; done"


def run(command, calls, *, told=None, **environment):
    """The exit status of a script that gets the signal `told` once it has called a stand-in."""
    program = subprocess.Popen(["bash", *command], env=os.environ | environment)
    if told is not None:
        end = time.monotonic() + 30
        while not calls.exists() or not calls.read_text():
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(0.2)
        program.send_signal(told)
    return program.wait(timeout=30)


@pytest.mark.parametrize(
    ("script", "told", "status"), [("exit 0", None, 0), ("exit 5", None, 5), (SAVES, signal.SIGTERM, 143)]
)
def test_a_pod_that_was_told_to_end_is_not_done(script, told, status, stand_ins):
    calls = stand_ins(jaxshard=script)
    assert run(["-c", jobset_command()], calls, told=told, JOB_COMPLETION_INDEX="1") == status
    assert "--checkpoint /runs/first/checkpoints --resume" in calls.read_text()


@pytest.fixture
def job(stand_ins, tmp_path):
    """Runs a start of the job on Slurm; `calls` is what it called, and `checkpoint` makes one of a step."""

    def start(script, told=None, failures="3", job="7"):
        (tmp_path / "calls").unlink(missing_ok=True)
        # scancel signals the processes, which here are the stand-in for srun.
        calls = stand_ins(
            srun=f"echo $$ > {tmp_path}/pid\n{script}", scancel=f"kill -TERM $(cat {tmp_path}/pid)", scontrol=""
        )
        environment = {"RUN": str(tmp_path / "run"), "SLURM_JOB_ID": job, "FAILURES": failures}
        status = run([str(FOLDER / "slurm.sbatch")], calls, told=told, **environment)
        return status, f"scontrol requeue {job}" in calls.read_text()

    return start


def make_checkpoint(tmp_path, step):
    folder = tmp_path / "run" / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("script", "told", "status", "again"),
    [
        ("exit 0", None, 0, False),
        ("exit 1", None, 1, True),
        ("exit 2", None, 2, False),
        (SAVES, signal.SIGUSR1, 0, True),  # the time limit is near
        ("sleep 1", signal.SIGTERM, -signal.SIGTERM, False),  # scancel, which signals the processes as well
    ],
)
def test_a_job_of_slurm_queues_again(script, told, status, again, job):
    assert job(script, told) == (status, again)


@pytest.mark.parametrize(
    ("script", "told"), [("exit 1", None), ("trap 'exit 143' TERM; sleep 5 & wait", signal.SIGUSR1)]
)
def test_starts_without_a_new_checkpoint_are_counted(script, told, job, tmp_path):
    def starts(*, job_id):
        return [job(script, told, failures="2", job=job_id)[1] for _ in range(2)]

    assert starts(job_id="7") == [True, False]
    assert starts(job_id="8") == [True, False], "another job has a count of its own"
    for step in (500, 1000):
        make_checkpoint(tmp_path, step)
        assert starts(job_id="9") == [True, False], "a new checkpoint ends the count"
