"""What `js.fit` tells while it runs: to functions, in a pipe, on a terminal and in a notebook."""

import itertools
import os
import pty
import re
import subprocess
import sys
import time
from io import StringIO

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxshard as js
from jaxshard.training.progress_views import PlainLines, TerminalLine, telling, view_on
from jaxshard.training.records import Record

PROGRAM = """
import itertools, sys
import jax, jax.numpy as jnp, numpy as np
import jaxshard as js

def step(run, batch):
    run = run._replace(step=run.step + 1)
    return run, {"loss": 8.0 / run.step}

def show(record):
    if record.step == 20:
        print("a line of the program")

run = js.TrainState(jnp.int32(0), {}, (), (), jax.random.key(0))
js.fit(run, step, itertools.repeat({"x": np.ones((4, 2))}), steps=40, callbacks=[show], PROGRESS)
"""


def new_run(step=0):
    return js.TrainState(jnp.int32(step), {"w": jnp.float32(0)}, (), (), jax.random.key(0))


def step(run, batch):
    run = run._replace(step=run.step + 1)
    return run, {"loss": run.step.astype(jnp.float32)}


def batches():
    return itertools.repeat({"x": np.ones((4, 2), np.float32)})


def record(number, speed=None, evaluation=None):
    return Record(number, {"loss": 8 / number}, 0.5, speed or {"rows_per_second": 64.0}, evaluation)


def test_a_function_is_told_every_phase_and_step():
    told = []
    js.fit(new_run(3), step, batches(), steps=6, evaluate=lambda run: {"loss": 1.0}, eval_every=2, progress=told.append)
    phases = ["compiling", "evaluating", "training", "training", "evaluating", "training", "finished"]
    assert [one.phase for one in told] == phases
    assert [one.step for one in told] == [3, 4, 4, 5, 6, 6, 6] and {one.steps for one in told} == {6}
    assert told[2].record.evaluation == {"loss": 1.0} and told[3].record.metrics == {"loss": 5.0}
    assert told[2].seconds_left is None and told[3].seconds_left > 0 and told[5].seconds_left == 0
    assert told[-1].goodput.total > 0 and told[-2].goodput is None


def test_the_time_left_counts_neither_the_first_step_nor_the_first_evaluation(monkeypatch):
    """They compile. Later evaluations count, as often as there were any."""
    told, costs, now = [], iter([100.0, 2.0, 4.0]), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def spend(seconds, result):
        now[0] += seconds
        return result

    js.fit(
        new_run(), lambda run, batch: spend(50.0 if run.step == 0 else 1.0, step(run, batch)), batches(), steps=9,
        evaluate=lambda run: spend(next(costs), {"loss": 1.0}), eval_every=3, progress=told.append,
    )  # fmt: skip
    left = [one.seconds_left for one in told if one.phase == "training"]
    assert left[:5] == [None, 7, 6, 5, 4] and left[5] == pytest.approx((5 + 2 * 2) / 5 * 3) and left[-1] == 0


def test_a_function_with_finish_is_closed_like_other_callbacks():
    class Show:
        error = None

        def __call__(self, progress):
            assert progress.step < 2, "no further"

        def finish(self, error):
            self.error = error

    show = Show()
    with pytest.raises(AssertionError, match="no further"):
        js.fit(new_run(), step, batches(), steps=5, progress=show)
    assert isinstance(show.error, AssertionError)


def test_only_the_first_process_tells(monkeypatch):
    told = []
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    js.fit(new_run(), step, batches(), steps=2, progress=told.append)
    assert told == []


def test_what_progress_may_be():
    with pytest.raises(TypeError, match=r"True, False, None or a function of a js.Progress, got str"):
        js.fit(new_run(), step, batches(), steps=1, progress="yes")


@pytest.mark.parametrize(("progress", "lines"), [(True, 12), (False, 0), (None, 0)])
def test_a_pipe_gets_about_ten_lines_if_asked(progress, lines, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich would write colours into a pipe
    js.fit(new_run(), step, batches(), steps=40, progress=progress)
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == (lines and lines + 1) and err.replace("\n", "").isprintable()
    if lines:
        assert err.startswith("  step 0/40  compiling the step ...\n  step 1/40  loss 1.000\n  step 4/40  loss 4.000  ")
        assert re.search(r"\n  step 40/40  loss 40\.000  [\d,.e+]+ rows/s  0:00:00 left\n  goodput [\d.]+% of 0:", err)


def test_lines_have_the_speed_without_compilation_the_memory_and_evaluations():
    page = StringIO()
    view = PlainLines(Console(file=page, width=200))
    known = {"tokens_per_second": 4096.0, "rows_per_second": 64.0, "mfu": 0.412, "memory_bytes": 12.3e9}
    for number in range(1, 9):
        evaluation = {"accuracy": 0.5, "loss": 2.0} if number % 3 == 0 else None
        speed = known | ({"tokens_per_second": 1.0} if number == 1 else {})
        view(js.Progress("training", number, 40, record(number, speed, evaluation), 3723.0))
    shown = page.getvalue().splitlines()
    assert shown[0] == "  step 1/40  loss 8.000  12.30 GB  1:02:03 left"  # its speed would be that of the compiler
    assert shown[1].startswith("  step 3/40  loss 2.667  4,096 tokens/s  MFU 41.2%  12.30 GB  held-out loss 2.0000 acc")
    assert [line.split()[1] for line in shown] == ["1/40", "3/40", "4/40", "7/40", "8/40"]
    assert [("held-out" in line) for line in shown] == [False, True, False, True, False]  # that of step 6 a bit later


def run_program(progress, **streams):
    program = PROGRAM.replace("PROGRESS", progress)
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "60"}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, **streams)


def test_a_terminal_shows_one_line_that_is_written_over_below_what_the_program_prints():
    ours, theirs = pty.openpty()
    with run_program("", stdout=theirs, stderr=theirs) as program:
        os.close(theirs)
        written = b""
        while chunk := read(ours):
            written += chunk
    os.close(ours)
    assert program.returncode == 0
    text = written.decode()
    assert "\x1b[2K" in text and "compiling the step, 0 s" in text
    left = rendered(text)
    assert left[0] == "a line of the program" and len(left) == 3
    assert re.fullmatch(r"  step 40/40  loss 0\.200  [\d,]+ rows/s", left[1]) and left[2].startswith("  goodput ")


def read(terminal):
    """The next output of a terminal; nothing at its end, which Linux tells as an error."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:
        return b""


def rendered(text):
    """The lines that stay on a terminal: of each line what was written after it was erased for the last time."""
    plain = [re.sub("\x1b\\[[\\d;?]*[A-Za-z]", "", line.split("\x1b[2K")[-1]).strip("\r") for line in text.split("\n")]
    return [line for line in plain if line]


def test_of_work_without_steps_a_terminal_keeps_nothing_and_a_file_each_part():
    terminal, file = StringIO(), StringIO()
    views = TerminalLine(Console(file=terminal, force_terminal=True, width=60)), PlainLines(Console(file=file))
    for view in views:
        with telling(view) as tell:
            tell("compiling for one device")
            tell("compiling for data=8")
    assert "compiling for one device, 0 s" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")
    assert file.getvalue() == "  compiling for one device ...\n  compiling for data=8 ...\n"


def test_the_view_suits_the_console():
    """Also where the environment asks rich for colours in a file."""
    assert isinstance(view_on(Console(file=StringIO(), force_terminal=True)), PlainLines)


@pytest.mark.slow
def test_a_notebook_shows_one_output_that_is_replaced():
    import nbclient
    import nbformat

    cell = nbformat.v4.new_code_cell(PROGRAM.replace("PROGRESS", "progress=None").replace("20", "99"))
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown, last = notebook.cells[0].outputs
    lines = shown["data"]["text/plain"].splitlines()
    assert lines[0].startswith("step 40/40  loss 0.200  ") and lines[1].startswith("goodput ") and len(lines) == 2
    assert last["output_type"] == "execute_result"  # the cell's own value
