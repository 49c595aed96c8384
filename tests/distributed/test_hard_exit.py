"""Processes of which one fails end at once, all of them and by themselves."""

import subprocess
import sys
import textwrap
import time

from tests.distributed.launched import free_address

PROGRAM = """
    import sys
    import jaxshard as js
    js.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    js.distributed.initialize()
    js.simulate_devices(1)
    import jax
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("all are here")
    if jax.process_index() == 1:
        raise ValueError("this one fails")
    multihost_utils.sync_global_devices("the other does not come")
"""


def test_an_error_in_one_process_ends_both_at_once():
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), free_address()]
    both = [subprocess.Popen([*command, str(index)], stderr=subprocess.PIPE, text=True) for index in (0, 1)]
    _, error = both[1].communicate(timeout=120)
    assert both[1].returncode == 1 and error.endswith("ValueError: this one fails\n")
    ended = time.monotonic()
    both[0].communicate(timeout=120)
    assert both[0].returncode != 0 and time.monotonic() - ended < 60
