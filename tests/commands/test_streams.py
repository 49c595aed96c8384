"""Standard output that is closed, full, read by nobody or ASCII alone; Ctrl-C at moments where Python forgets it."""

import os
import subprocess
import sys

import pytest

CLOSED = "is closed; redirect it to a file, or to /dev/null\n"
FULL = "jaxshard: standard output can't be written: No space left on device\n"
HELP = "train --help"
SCHEDULE = "schedule gpipe --stages 2 --microbatches 2"


def run(shell, **environment):
    """Runs a line of a shell, in which `jaxshard` is this one; its last status, and what went to both streams."""
    line = f'jaxshard() {{ "{sys.executable}" -m jaxshard "$@"; }}; {shell}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, env=os.environ | environment, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("words", ["--version", "--help", HELP, "nonsense", "train --nonsense"])
def test_a_closed_stream_is_refused(words):
    assert run(f"jaxshard {words} >&-") == (2, "", f"jaxshard: standard output {CLOSED}")
    assert run(f"jaxshard {words} 2>&-") == (2, f"jaxshard: standard error {CLOSED}", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_a_line(unbuffered):
    for words in ("--version", HELP):
        assert run(f"jaxshard {words} > /dev/full", PYTHONUNBUFFERED=unbuffered) == (2, "", FULL)
    assert run("jaxshard nonsense 2> /dev/full", PYTHONUNBUFFERED=unbuffered) == (2, "", "")


@pytest.mark.parametrize("words", [HELP, pytest.param(SCHEDULE, marks=pytest.mark.slow)])
def test_a_reader_that_is_gone_ends_the_command_without_a_word(words):
    assert run(f"set -o pipefail; jaxshard {words} | true") == (141, "", "")


@pytest.mark.parametrize("words", [pytest.param(SCHEDULE, marks=pytest.mark.slow), "train --modl x", HELP])
def test_an_ascii_terminal(words):
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    status, out, err = run(f"jaxshard {words}", **ascii_only)
    assert (out + err).isascii() and status == (2 if "modl" in words else 0)
    assert ("did you mean --model?" in err and err.count("\n") == 1) if status else not err


LOST = """
import os, signal, sys, time
from jaxshard.commands import main

class Collected:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # an exception that is raised here is printed and forgotten

def launch(flags) -> int:
    if sys.argv[1] == "run":
        Collected()
    time.sleep(20)
    return 0

def runner_of(name):
    if sys.argv[1] == "import":
        Collected()
    return launch

main.runner_of = runner_of
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.exit(main.main(["launch", "-n", "1"]))
"""


@pytest.mark.parametrize("when", ["import", "run"])
def test_ctrl_c_where_python_forgets_exceptions(when):
    done = subprocess.run([sys.executable, "-c", LOST, when], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "jaxshard: interrupted\n")
