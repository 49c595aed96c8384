"""`jaxshard train`: what it trains, prints, writes and refuses."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxshard import schedules
from jaxshard.commands.main import main

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--batch", "16", "--seq", "16", "--steps", "2", "--eval-every", "2", "--sample", "0"]
KINDS = {"all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"}
DATA = {
    "text": ["text.py"],
    "folder": ["folder"],
    "npy": ["tokens.npy"],
    "bin": ["tokens.bin", "--dtype", "uint16", "--vocab", "256", "--sample", "3"],
}


@pytest.fixture(scope="module", autouse=True)
def eight_devices():
    """The number of simulated devices is fixed by the first touch, which must not be that of a test with --devices."""
    assert jax.device_count() == 8


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The same text as a file, a folder and token arrays."""
    folder = tmp_path_factory.mktemp("data")
    text = (Path(__file__).read_text() * 3).encode()
    (folder / "text.py").write_bytes(text)
    np.save(folder / "tokens.npy", np.frombuffer(text, np.uint8))
    np.frombuffer(text, np.uint8).astype(np.uint16).tofile(folder / "tokens.bin")
    (folder / "folder").mkdir()
    for number in range(3):
        (folder / "folder" / f"{number}.txt").write_bytes(text)
    (folder / "folder" / "picture.png").write_bytes(b"\x89PNG\xff")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "short.txt").write_bytes(b"a short text")
    return folder


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """The losses of two steps on one device."""
    file = tmp_path_factory.mktemp("one") / "one.json"
    assert main(["train", *TINY, "--data", str(data / "text.py"), "--devices", "1", "--json", str(file)]) == 0
    return json.loads(file.read_text())


def check_contract(result, *, devices):
    """The promises that are made for the JSON object."""
    assert all(type(loss) is float and loss > 0 for loss in [*result["losses"], result["loss_eval"]])
    assert result["tokens_per_second"] > 0 and result["flops_per_second"] > 0
    share, seconds = result["goodput"]["share"], result["goodput"]["seconds"]
    assert 0 < share < 1 and seconds["compile"] >= 0 and seconds["evaluation"] > 0
    assert type(result["params"]) is int and type(result["devices"]) is int and result["devices"] == devices
    assert np.prod(list(result["mesh"].values())) == devices
    predicted, compiled = result["bytes_per_device"]["predicted"], result["bytes_per_device"]["compiled"]
    assert {"param", "grad", "opt", "state", "batch", "arguments"} <= set(predicted)
    assert compiled["arguments"] == predicted["arguments"] and compiled["temporaries"] > 0
    assert sum(predicted[role] for role in ("param", "opt", "state", "batch", "step_and_key")) == predicted["arguments"]
    for row in result["collectives"]:
        assert set(row) == {"kind", "axis", "count", "bytes"} and row["kind"] in KINDS and row["count"] > 0
        # The compiler may pick groups that are no product of axes, where it chooses the collectives.
        assert set(row["axis"].split("+")) <= {*result["mesh"], *(["?"] if result["engine"] == "auto" else [])}
    assert len(result["corpus"]["sha256"]) == 64 and result["versions"]["jax"] == jax.__version__


PRODUCT = itertools.product(("ddp", "zero1", "zero2", "fsdp", "hsdp"), ("explicit", "auto"))
CASES = [(*case, kind) for case, kind in zip(PRODUCT, itertools.cycle(DATA))]
"""Every strategy and engine, each with another kind of data."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy, engine, kind", CASES)
def test_every_strategy_and_engine_gives_the_losses_of_one_device(strategy, engine, kind, data, expected, capsys):
    """Losses within 1e-5 of one device's, relative: the second one has seen Adam, which amplifies rounding."""
    name, *flags = DATA[kind]
    flags = ["--data", str(data / name), *flags, "--strategy", strategy, "--engine", engine]
    assert main(["train", *TINY, *flags, "--json", "-"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    check_contract(result, devices=8)
    assert result["strategy"] == strategy and result["engine"] == engine
    # Bytes are shown as text, other tokens as numbers.
    assert result["sample"] is None if kind != "bin" else len(result["sample"]["text"].split()) == 3
    assert result["corpus"]["unit"] == ("token" if kind == "bin" else "byte")
    assert result["mesh"] == ({"replica": 2, "data": 4} if strategy == "hsdp" else {"data": 8})
    shown = [line.split()[:2] for line in output.err.splitlines() if line.split()][1:4]
    assert shown[0][0] == "mesh" and shown[1:] == [["strategy", strategy], ["engine", engine]]
    split = result["bytes_per_device"]["predicted"]["param"] < expected["bytes_per_device"]["predicted"]["param"]
    assert split == (strategy in ("fsdp", "hsdp"))
    if kind == "folder":
        assert "left out 1 files that are not UTF-8, such as picture.png" in output.err
    else:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert result["loss_eval"] == pytest.approx(expected["loss_eval"], rel=1e-5)


TENSOR = ["data=2,tensor=4", "data=4,tensor=2", "tensor=8"]


def tensor_cells():
    for strategy, engine, mesh in itertools.product(("ddp", "zero1", "zero2", "fsdp"), ("explicit", "auto"), TENSOR):
        yield pytest.param(strategy, engine, mesh, marks=pytest.mark.slow)
    for engine in ("explicit", "auto"):
        yield pytest.param("hsdp", engine, "replica=2,data=2,tensor=2", marks=pytest.mark.slow)


def pipe_cells():
    meshes = ("data=2,tensor=2,pipe=2", "data=4,pipe=2", "pipe=4,tensor=2")
    for strategy, schedule, mesh in itertools.product(("zero1", "fsdp"), schedules.NAMES, meshes):
        fast = (strategy, schedule, mesh) == ("fsdp", "interleaved", meshes[0])
        yield pytest.param(strategy, schedule, mesh, marks=() if fast else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "schedule", "mesh"), list(pipe_cells()))
def test_a_pipeline_gives_the_losses_of_one_device(strategy, schedule, mesh, data, expected, capsys):
    flags = ["--data", str(data / "text.py"), "--strategy", strategy, "--mesh", mesh, "--schedule", schedule]
    assert main(["train", *TINY, *flags, "--json", "-"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    check_contract(result, devices=8)
    assert (result["engine"], result["schedule"], result["stash"]) == ("pipelined", schedule, "layer")
    assert "remat" not in result  # of the model, which a pipeline does not follow
    assert f"schedule    {schedule}, {result['microbatches']} micro-batches" in output.err
    assert any(row["kind"] == "collective-permute" and row["axis"] == "pipe" for row in result["collectives"])
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["loss_eval"] == pytest.approx(expected["loss_eval"], rel=1e-5)


@pytest.mark.parametrize(("strategy", "engine", "mesh"), list(tensor_cells()))
def test_a_tensor_axis_gives_the_losses_of_one_device(strategy, engine, mesh, data, expected, capsys):
    """Losses within 1e-5 of one device's, relative; every array of a block is smaller than on one device."""
    flags = ["--data", str(data / "text.py"), "--strategy", strategy, "--engine", engine, "--mesh", mesh]
    assert main(["train", *TINY, *flags, "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    check_contract(result, devices=8)
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["mesh"]["tensor"] == int(mesh.rpartition("=")[2])
    predicted, alone = (one["bytes_per_device"]["predicted"] for one in (result, expected))
    assert predicted["param"] < 1.1 * alone["param"] / result["mesh"]["tensor"]
    over_tensor = {row["kind"] for row in result["collectives"] if row["axis"] == "tensor"}
    assert over_tensor == {"all-reduce"} if engine == "explicit" else "all-reduce" in over_tensor


@pytest.mark.slow
def test_one_device_has_no_collectives(expected):
    check_contract(expected, devices=1)
    assert expected["collectives"] == [] and len(expected["losses"]) == 2 == expected["evaluations"][-1]["step"]


@pytest.mark.slow
def test_writes_what_it_is_asked_for_and_shows_tables(data, tmp_path, capsys):
    flags = ["--devices", "3", "--seq", "8", "--steps", "5", "--sample", "8", "--eval-every", "2", "--remat", "dots"]
    files = ["--json", "r.json", "--log", "log.jsonl", "--tensorboard", "tb", "--profile", "profile"]
    files = [part if part.startswith("--") else str(tmp_path / part) for part in files]
    assert main(["train", "--data", str(data / "text.py"), *flags, *files, "--microbatches", "2"]) == 0
    output = capsys.readouterr()
    result = json.loads((tmp_path / "r.json").read_text())
    check_contract(result, devices=3)
    # The batch of the recipe, 64, rounded up to what three devices and two turns divide.
    assert result["recipe"]["batch"] == 66 and result["microbatches"] == 2
    assert [one["step"] for one in result["evaluations"]] == [2, 4, 5]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == result["losses"] and lines[1]["eval/loss"] > 0
    assert list((tmp_path / "tb").iterdir()) and list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert f"jaxshard profile {tmp_path / 'profile'} says where the time went" in output.out
    assert output.err == "" and "\x1b" not in output.out
    for piece in ("step 5/5  loss", "tokens/s", "0:00 left", "held-out loss", "bytes per device", "optimizer"):
        assert piece in output.out
    assert re.search(r"\n  goodput \d", output.out)
    assert f"held-out {result['loss_eval']:.4f} nats per byte" in output.out
    assert "\n  sample, at temperature 0.8, after a prompt\n" in output.out
    assert output.out.rstrip().endswith(result["sample"]["prompt"] + result["sample"]["text"].rstrip())


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--change", "vocab=8"], "--change vocab=8: the vocabulary is that of the corpus; leave vocab out"),
        (["--change", "seq=8"], "--seq 16 and --change seq=8 both say seq; leave one out"),
        (["--mesh", "data"], "--mesh data: is not name=value; write each axis once, as name=size, such as data=8"),
        (
            ["--mesh", "data=-1", "--strategy", "hsdp"],
            "needs the axes replica and data, and tensor, pipe, context and expert if you like; write --mesh rep",
        ),
        (["--devices", "9"], "--devices 9: there are 8 cpu device(s); ask for at most 8"),
        (["--data", "absent"], "absent does not exist; give a text file, a folder of text"),
        (["--data", "empty.txt"], "empty.txt is empty"),
        (["--data", "short.txt"], "too few for one window of seq + 1 = 17; give more data or a seq of at most"),
        (["--data", "tokens.bin"], "its dtype must be given (such as uint16)"),
        (["--data", "tokens.bin", "--dtype", "uint16", "--vocab", "99"], "outside the vocabulary of 99"),
        (["--batch", "12"], "--batch 12: use a multiple of 8, the devices that share the rows times the micro-batches"),
        (["--microbatches", "3"], "--batch 16: use a multiple of 24, the devices"),
        (["--json", "absent/r.json"], "the folder absent does not exist; make it, or give another file"),
        (["--json", "folder"], "--json folder: that is a folder; give a file"),
    ],
)
def test_user_errors_are_one_line_and_exit_status_2(flags, message, data, monkeypatch, capsys):
    monkeypatch.chdir(data)
    given = [] if "--data" in flags else ["--data", "text.py"]
    assert main(["train", *TINY, *given, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxshard: ") and error.count("\n") == 1 and message in error


def test_dtype_and_vocab_need_a_file(capsys):
    assert main(["train", "--vocab", "100"]) == 2
    assert "name it with --data" in capsys.readouterr().err


def test_tensorboard_that_is_not_installed_is_refused_before_training(data, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    assert main(["train", *TINY, "--data", str(data / "text.py"), "--tensorboard", str(tmp_path)]) == 2
    assert 'pip install "tensorboardX' in capsys.readouterr().err


def test_a_fault_keeps_its_traceback(data, monkeypatch):
    monkeypatch.setattr("jaxshard.commands.train.make_step", lambda *args, **options: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["train", *TINY, "--data", str(data / "text.py"), "--devices", "1"])


def test_an_interrupted_run_ends_without_a_traceback(data, monkeypatch, capsys):
    def interrupt(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxshard.commands.train.make_step", interrupt)
    assert main(["train", *TINY, "--data", str(data / "text.py"), "--devices", "1"]) == 130
    assert capsys.readouterr().err == "jaxshard: interrupted\n"


@pytest.mark.slow
def test_a_fresh_process_simulates_eight_devices_and_keeps_standard_output_pure(data, expected, tmp_path):
    """Even where the environment asks for a platform that is not there; losses within 1e-5 of one device, relative."""
    flags = ["--data", str(data / "text.py"), "--json", "-", *TINY]
    done = run_jaxshard("train", *flags, cwd=tmp_path, JAX_PLATFORMS="rocm")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    check_contract(result, devices=8)
    assert (result["strategy"], result["engine"]) == ("fsdp", "explicit")
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert result["loss_eval"] == pytest.approx(expected["loss_eval"], rel=1e-5)
    assert "8 simulated CPU devices" in done.stderr and "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr


@pytest.mark.slow
def test_a_fresh_process_refuses_in_one_line(tmp_path):
    done = run_jaxshard("train", "--data", "absent", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert done.returncode == 2 and done.stdout.splitlines()[1].split() == ["mesh", "data=8"]
    assert done.stderr.count("\n") == 1 and "absent does not exist" in done.stderr


def run_jaxshard(*flags, cwd, **environment):
    kept = "JAX_DISABLE_MOST_OPTIMIZATIONS"  # of the fast tier
    inherited = {name: x for name, x in os.environ.items() if name == kept or not name.startswith(("JAX_", "XLA_"))}
    environment = inherited | {"PYTHONPATH": str(ROOT)} | environment
    command = [sys.executable, "-m", "jaxshard", *flags]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_the_default_run_learns_the_standard_library(tmp_path):
    """Without any flag but for the file of the results: below 2.2 nats per byte of held-out text."""
    done = run_jaxshard("train", "--json", "result.json", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    check_contract(result, devices=8)
    assert result["strategy"] == "fsdp" and result["engine"] == "explicit" and result["loss_eval"] < 2.2
    assert len(result["losses"]) == result["recipe"]["steps"]
