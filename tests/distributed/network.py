"""Hosts on one switch, each in a network namespace of its own, whose cables can be pulled and put back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PORT = 8476
"""The port of process 0 for the coordinator."""
ROOT = Path(__file__).parents[2]


def networks_are_allowed() -> bool:
    """Return whether this user may make network namespaces, which root may on Linux."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    command = ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "switch", "type", "bridge"]
    return subprocess.run(command, capture_output=True).returncode == 0


class Network:
    """A switch and `count` hosts "node0", "node1", ... with the addresses 10.77.0.1, 10.77.0.2, ...

    Use it in a `with` block, after which the hosts, and all programs on them, are gone.
    """

    def __init__(self, folder: Path, count: int):
        self._programs: list[subprocess.Popen[str]] = []
        names = "".join(f"10.77.0.{host + 1} node{host}\n" for host in range(count))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        make = "ip link add switch type bridge && ip link set switch up && mount --bind hosts /etc/hosts"
        self._switch = self._keep(["unshare", "--net", "--mount"], make, folder)
        self._hosts = []
        for host in range(count):
            inside = ["nsenter", f"--target={self._switch}", "--net", "--mount", "unshare", "--net", "--uts"]
            self._hosts.append(self._keep(inside, f"hostname node{host} && ip link set lo up", folder))
            self._on_switch("link", "add", f"port{host}", "type", "veth", "peer", "eth0", "netns", self._hosts[host])
            self._on_switch("link", "set", f"port{host}", "up", "master", "switch")
            address = f"ip addr add 10.77.0.{host + 1}/24 dev eth0 && ip link set eth0 up"
            subprocess.run([*self._enter(host), "sh", "-c", address], check=True)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        for program in reversed(self._programs):
            program.kill()
            program.communicate()

    def cut(self, host: int) -> None:
        """Pull the cable of a host: packets are lost, and nobody is told."""
        self._on_switch("link", "set", f"port{host}", "nomaster")

    def heal(self, host: int) -> None:
        """Put the cable of a host back."""
        self._on_switch("link", "set", f"port{host}", "master", "switch")

    def start(self, host: int, code: str, output: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a Python program on a host, the process with its number of as many as there are hosts."""
        there = {
            "JAXSHARD_COORDINATOR_ADDRESS": f"10.77.0.1:{PORT}",
            "JAXSHARD_NUM_PROCESSES": str(len(self._hosts)),
            "JAXSHARD_PROCESS_ID": str(host),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
        }
        with output.open("w") as file:
            program = subprocess.Popen(
                [*self._enter(host), sys.executable, "-c", code],
                stdout=file, stderr=file, env=os.environ | there | environment, text=True,
            )  # fmt: skip
        self._programs.append(program)
        return program

    def _enter(self, host: int) -> list[str]:
        return ["nsenter", f"--target={self._hosts[host]}", "--net", "--uts", "--mount"]

    def _on_switch(self, *command: object) -> None:
        subprocess.run(["nsenter", f"--target={self._switch}", "--net", "ip", *map(str, command)], check=True)

    def _keep(self, inside: list[str], make: str, folder: Path) -> int:
        """Start a program that makes namespaces and keeps them until it is ended; return its process id."""
        program = subprocess.Popen(
            [*inside, "sh", "-c", f"{make} && echo made && exec cat"],
            cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._programs.append(program)
        assert program.stdout is not None and program.stdout.readline() == "made\n"
        return program.pid
