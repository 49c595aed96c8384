"""A Slurm of four nodes on this machine, in Linux namespaces of its own."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
NODES = ("n1", "n2", "n3", "n4")
STUCK = 420
"""Seconds after which a job that does not change is broken."""

CONFIGURATION = """
ClusterName=small
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that queues again is held for as long as a credential is valid: by default for 120 seconds.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
# A node that does not answer counts as lost: by default after 300 seconds.
SlurmdTimeout=30
"""
PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"

START = """
mount --bind hosts /etc/hosts
munged --force --foreground --key-file=munge.key --socket="$PWD/munge.socket" --pid-file="$PWD/munge.pid" \
    --log-file="$PWD/munge.log" --seed-file="$PWD/munge.seed" &
while [ ! -S munge.socket ]; do sleep 0.1; done
slurmctld -D -c &
# The processes of a node n1 are a namespace: all of them end when a file n1.lost appears; it starts again without one.
node() {
    while true; do
        unshare --mount --pid --fork --kill-child --mount-proc bash -c 'slurmd -D -c -N "$0" & wait' "$1" &
        while [ ! -e "$1.lost" ]; do sleep 0.1; done
        kill -KILL $!
        while [ -e "$1.lost" ]; do sleep 0.1; done
    done
}
for name in "$@"; do node "$name" & done
wait
"""


class Slurm(NamedTuple):
    """A cluster that runs; every program in it ends with `program`."""

    folder: Path
    program: subprocess.Popen[bytes]

    def run(self, *command: str, **environment: str) -> str:
        """Return what one of Slurm's commands prints."""
        known = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | environment
        found = subprocess.run(command, env=known, cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    def facts(self, job: str) -> dict[str, str]:
        """Return what Slurm knows of a job, such as "JobState" and "Restarts"."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def wait_for(self, job: str, **wanted: str) -> dict[str, str]:
        """Return the facts of a job once they are as wanted."""
        end = time.monotonic() + STUCK
        while not wanted.items() <= (facts := self.facts(job)).items():
            assert time.monotonic() < end, f"{facts}\n{self.output(job)}"
            time.sleep(0.5)
        return facts

    def lose(self, node: str) -> None:
        """End everything on a node, as where its machine loses power."""
        (self.folder / f"{node}.lost").touch()

    def repair(self) -> None:
        """Start the nodes that were lost, and return once all are idle."""
        for name in NODES:
            (self.folder / f"{name}.lost").unlink(missing_ok=True)
        end = time.monotonic() + STUCK
        while self.states() != ["idle"] * len(NODES):
            assert time.monotonic() < end, (self.folder / "daemons.log").read_text()
            time.sleep(0.5)

    def states(self) -> list[str]:
        """Return the state of every node."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").split()

    def output(self, job: str) -> str:
        """Return what a job wrote so far."""
        files = self.folder.glob(f"*-{job}.out")
        return "\n".join(file.read_text() for file in files)


def start_slurm(folder: Path) -> Slurm:
    """Start a cluster whose nodes are idle; raise where the system does not allow it."""
    controller, *ports = _free_ports(1 + len(NODES))
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"
        for name, port in zip(NODES, ports, strict=True)
    ]
    configuration = CONFIGURATION.format(folder=folder, port=controller) + "".join(nodes) + PARTITION
    (folder / "slurm.conf").write_text(configuration)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + f"\n127.0.0.1 {' '.join(NODES)}\n")
    namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (folder / "daemons.log").open("wb") as log:
        program = subprocess.Popen(
            [*namespaces, "bash", "-c", START, "slurm", *NODES], cwd=folder, stdout=log, stderr=log,
            env=os.environ | {"SLURM_CONF": str(folder / "slurm.conf")},
        )  # fmt: skip
    slurm, end = Slurm(folder, program), time.monotonic() + 60
    while True:
        try:
            if slurm.states() == ["idle"] * len(NODES):
                return slurm
        except AssertionError:  # it does not listen yet
            pass
        if program.poll() is not None or time.monotonic() > end:
            program.kill()
            raise RuntimeError(f"Slurm did not start:\n{(folder / 'daemons.log').read_text()}")
        time.sleep(0.5)


def missing() -> str | None:
    """Return why a Slurm can't be started here, or None."""
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"needs {', '.join(absent)}: apt-get install munge slurmctld slurmd slurm-client"
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    allowed = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode == 0
    return None if allowed else "namespaces are not allowed here"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for free in sockets:
        free.bind(("localhost", 0))
    ports = [free.getsockname()[1] for free in sockets]
    for free in sockets:
        free.close()
    return ports
