"""Load the compiler of absent chips, without the lines that libtpu prints on a host that has no TPU."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from jaxshard.compiler.planned import topology_name
from jaxshard.compiler.topology import Target, has_compiler, topology_devices


def load_compiler(topology: str, slices: int = 1) -> None:
    """Load the compiler of a topology, if it is installed, before a command shows anything that takes long.

    On a host without TPUs libtpu looks for some all the same and prints that it found none ("Failed to find host
    bounds", "INVALID_ARGUMENT"), whatever its log level. To compile none is needed, so these lines are left out.

    Args:
      topology: the name, such as "v5e:2x4".
      slices: the number of slices.

    Raises:
      ValueError: there is no such topology.
    """
    if has_compiler(Target(topology_name(topology), slices)):
        with _hidden_stderr():
            topology_devices(topology, num_slices=slices)


@contextlib.contextmanager
def _hidden_stderr() -> Iterator[None]:
    """Hide what this process, compiled libraries included, writes to standard error; show it if the block raises."""
    sys.stderr.flush()
    stderr, failed = os.dup(2), True
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
            failed = False
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            if failed:
                hidden.seek(0)
                os.write(2, hidden.read())
