"""The comparison with peers: what its command counts, and that its programs train the same model."""

import subprocess
import sys

import pytest

from tests.benchmarks.scripts import BENCHMARKS, script

peers = script("peers")


def test_lines_of_code_are_counted_without_comments_docstrings_and_blanks(peers):
    source = '"""A\nmodule."""\n\n# why\nx = (\n    1,\n)\n\n\ndef f():\n    """Text."""\n'
    source += '    y = """not a\n    docstring"""  # why\n'
    assert peers.code_lines(source) == ["x = (", "1,", ")", "def f():", 'y = """not a', 'docstring"""  # why']


def test_new_lines_are_those_that_the_program_for_one_device_lacks(peers):
    counts = {peer.name: peers.count_lines(peer) for peer in peers.PEERS}
    assert counts[peers.JAX]["new_lines"] == counts[peers.TORCH]["new_lines"] == 0
    assert 0 < counts["jaxshard fsdp"]["new_lines"] < counts["jax.jit, shardings by hand (FSDP)"]["new_lines"]
    assert counts["torch DDP, gloo"]["new_lines"] < counts["torch FSDP2, gloo"]["new_lines"]


@pytest.mark.slow
def test_our_programs_train_what_plain_jax_trains():
    """The command itself fails unless losses agree to 1e-3."""
    words = ["--rounds", "1", "--steps", "1", "--width", "32", "--blocks", "1", "--heads", "2", "--seq", "16"]
    only = [word for name in ("jax, one", "by hand", "fsdp", "tensor") for word in ("--only", name)]
    found = subprocess.run(
        [sys.executable, str(BENCHMARKS / "peers.py"), *words, *only], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("jaxshard") >= 6
