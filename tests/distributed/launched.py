"""Real processes on this machine, as a cluster would start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from typing import NamedTuple


class Ended(NamedTuple):
    status: int
    out: str
    err: str


BEGIN = """
    import os, signal, sys, threading, time
    import jax
    jax.config.update("jax_num_cpu_devices", 8 // int(os.environ["JAXSHARD_NUM_PROCESSES"]))
    import numpy as np
    import optax
    import jaxshard as js
    js.distributed.initialize()
    index = jax.process_index()

    def init_fn(key):
        return {"w": jax.random.normal(key, (64, 512)), "b": np.zeros(512, np.float32)}

    def loss_fn(params, batch, key):
        y = batch["x"] @ params["w"] + params["b"]
        return js.Mean((y**2).sum(), y.size)

    tx = optax.sgd(0.1)

    def made(strategy=js.fsdp("data"), mesh=None):
        return js.layout(strategy, mesh or js.make_mesh(data=8), init_fn, tx)

    def batch(rows):
        return {"x": np.ones((rows, 64), np.float32)}

    class Ones:
        batch = 8
        def rows(self, step, rows):
            return {"x": np.ones((len(rows), 64), np.float32)}
"""
"""How the programs of these tests begin: a small model and its data."""


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def printed_together(program: str, *arguments: str, count: int) -> list[str]:
    """What processes printed that ran a program together and ended well.

    Its arguments are the coordinator's address, the number of the process, how many there are, and these.
    """
    command = [sys.executable, "-c", textwrap.dedent(program), free_address()]
    started = [
        subprocess.Popen(
            [*command, str(index), str(count), *arguments],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for index in range(count)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=400)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count, outputs
    return outputs


def processes(program: str, *arguments: str, count: int = 2, seconds: float = 200.0) -> list[Ended]:
    """How processes ended that ran a program together."""
    code = textwrap.dedent(BEGIN) + textwrap.dedent(program)
    there = {
        "JAX_PLATFORMS": "cpu",
        "JAXSHARD_COORDINATOR_ADDRESS": free_address(),
        "JAXSHARD_NUM_PROCESSES": str(count),
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | there | {"JAXSHARD_PROCESS_ID": str(index)},
        )
        for index in range(count)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [Ended(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]
