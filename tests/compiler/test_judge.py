"""Asking a compiler in a child process: when it is ended, what is remembered, and what goes wrong."""

import fcntl
import gzip
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.commands.errors import UsageError, refusals
from jaxshard.compiler import answers, judge
from jaxshard.compiler.topology import Target
from jaxshard.core.compat import CompilerInput
from tests.compiler.test_dump import write_dump
from tests.engines.programs import tpu

TARGET = Target("v5e:2x2")
REFUSAL = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (39.08G) exceeds "
    "available HBM (15.75G).\nlines that follow"
)
SCRIPT = """
import shutil, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
with open({starts!r}, "a") as file:
    file.write(folder.name + "\\n")
{body}
"""
ASSIGN = """
shutil.copytree({dump!r}, folder / "dump", dirs_exist_ok=True)
(folder / "dump" / "module_1.after_optimizations_after_buffer_assignment.txt").write_text("")
"""
ROOT = str(Path(js.__file__).parents[1])


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Put a script in the place of the compiler; returns the folders of the children that it started."""
    starts, dump = tmp_path / "starts", tmp_path / "dump"
    dump.mkdir()
    write_dump(dump)
    asked = CompilerInput(b"program", b"options", (("flag", True),), (0, 1, 2, 3), "version 1")
    monkeypatch.setattr(judge, "compiler_input", lambda lowered: asked)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def use(body):
        script = tmp_path / "child.py"
        script.write_text(SCRIPT.format(starts=str(starts), body=body.format(dump=str(dump))))
        monkeypatch.setattr(judge, "CHILD", script)
        return lambda: len(starts.read_text().splitlines()) if starts.exists() else 0

    return use


def test_a_compiler_is_ended_once_memory_is_assigned_and_not_asked_again(compiler):
    started = compiler(ASSIGN + "time.sleep(200)")
    began = time.monotonic()
    first = judge.judge(None, TARGET)
    assert time.monotonic() - began < 100
    assert first.assignment.peak == 512 + 4096 + 8192 + 2048 and first.text.startswith("HloModule")
    again = judge.judge(None, TARGET)
    assert again == first and started() == 1
    judge.judge(None, Target("v5e:2x4"))
    assert started() == 2


def test_a_damaged_answer_is_asked_for_again(compiler):
    started = compiler(ASSIGN)
    found = judge.judge(None, TARGET)
    (file,) = (Path(os.environ["XDG_CACHE_HOME"]) / "jaxshard" / "compiled").iterdir()
    for damaged in (b"", file.read_bytes()[:100], gzip.compress(b'{"assignment": 3}'), gzip.compress(b"[]")):
        file.write_bytes(damaged)
        assert judge.judge(None, TARGET)._replace(seconds=found.seconds) == found
    assert started() == 5


def test_the_answers_that_were_not_used_for_longest_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(answers, "MOST_BYTES", 3000)
    noise = {"text": "".join(f"{number * 2654435761 % 2**32:x}" for number in range(200))}  # does not compress away
    for number in range(6):
        answers.save_answer(str(number), noise)
        os.utime(tmp_path / "jaxshard" / "compiled" / f"{number}.json.gz", (number, number))
        assert answers.load_answer("0") == noise  # used last
    left = {file.name.partition(".")[0] for file in (tmp_path / "jaxshard" / "compiled").iterdir()}
    assert {"0", "5"} <= left < {"0", "1", "2", "3", "4", "5"}


def test_a_refusal_is_an_answer_and_another_error_is_raised(compiler):
    started = compiler(f"(folder / 'error.txt').write_text({REFUSAL!r})")
    found = judge.judge(None, TARGET)
    assert found.assignment is None and found.refusal == REFUSAL.split("\n")[0]
    assert judge.judge(None, TARGET) == found and started() == 1
    compiler("(folder / 'error.txt').write_text('INTERNAL: a bug')")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: a bug"):
        judge.judge(None, Target("v5e:2x4"))


def test_a_child_that_dies_or_takes_too_long_is_named(compiler):
    compiler("raise SystemExit('no libtpu here')")
    with pytest.raises(RuntimeError, match="ended with 1: no libtpu here"):
        judge.judge(None, TARGET)
    compiler("time.sleep(200)")
    with pytest.raises(TimeoutError, match=r"of v5e:2x2 has assigned no memory after 1 s.*jaxshard plan --estimate"):
        judge.judge(None, TARGET, seconds=1)
    with pytest.raises(UsageError, match="--estimate"), refusals():  # a command says it in a line
        judge.judge(None, TARGET, seconds=0)


PARENT = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from jaxshard.core.compat import CompilerInput
from jaxshard.compiler import judge
from jaxshard.compiler.topology import Target
judge.compiler_input = lambda lowered: CompilerInput(b"", b"", (), (), "")
# The child itself, kept from compiling by a request that it waits for.
judge.CHILD = Path({child!r})
judge.judge(None, Target("v5e:2x2"))
"""


def test_a_child_ends_with_its_parent(tmp_path):
    """Also with one that is killed: the thread that waits for standard input is the real child's."""
    real = Path(judge.__file__).with_name("child.py").read_text()
    child = tmp_path / "child.py"
    child.write_text(
        real.replace(
            '    request = json.loads((folder / "request.json").read_text())',
            f"    import time\n    Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n    time.sleep(200)",
        )
    )
    assert child.read_text() != real
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(root=ROOT, child=str(child))])
    try:
        pid = _wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    _wait_for(lambda: not _runs(int(pid)))


def _wait_for(found):
    for _ in range(1000):
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError("waited in vain")


def _runs(pid):
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def step_of():
    def loss(params, batch, key):
        return js.Mean((jnp.tanh(batch @ params["w"]) ** 2).sum(), len(batch))

    mesh, tx = js.plan.planned_mesh("v5e:2x2", data=4), optax.adam(0.1)
    layout = js.layout(js.fsdp(), mesh, lambda key: {"w": jnp.ones((128, 128))}, tx)
    return js.make_step(loss, tx, layout), jax.ShapeDtypeStruct((8, 128), jnp.float32)


@tpu
def test_the_tpu_compiler_answers_beside_a_process_that_has_the_chips(tmp_path, monkeypatch):
    """On a TPU VM a training process holds libtpu's lock file; a compiler needs neither lock nor chips."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ALLOW_MULTIPLE_LIBTPU_LOAD", raising=False)
    step, batch = step_of()
    lock = Path("/tmp/libtpu_lockfile")
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Twice from one line: the lines of a program are a part of it.
        verdict, again = (js.plan.compile_for(step, batch, "v5e:2x2") for _ in range(2))
    assert verdict.judged_by == "compiler" and verdict.fits is True and verdict.cycles is None
    matrix = 128 * 128 * 4
    assert verdict.by_role["parameters"] == matrix // 4 and verdict.by_role["optimizer state"] > 2 * matrix // 4
    assert verdict.argument_bytes < verdict.live_bytes <= verdict.allocated_bytes
    assert {row.kind for row in verdict.traffic} >= {"all-gather"}
    assert again.memory() == verdict.memory() and again.text == verdict.text
