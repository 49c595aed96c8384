"""The command line as a whole: help, commands and flags that do not exist, and `jaxshard doctor`."""

import gc
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import jax
import pytest

import jaxshard as js
from jaxshard.commands import doctor, packages
from jaxshard.commands import main as main_file
from jaxshard.commands.main import COMMANDS, main

LOADED = """
import sys
from jaxshard.commands.main import main
print(main(sys.argv[1:]), sorted({"jax", "rich"} & set(sys.modules)))
"""


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    """The doctor tries XLA_FLAGS in another process."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.parametrize(("words", "status"), [("--help", 0), ("train -h", 0), ("nonsense", 2), ("train --stpes 3", 2)])
def test_help_and_refusals_import_neither_jax_nor_rich(words, status):
    done = subprocess.run([sys.executable, "-c", LOADED, *words.split()], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{status} []"


@pytest.mark.parametrize("is_own", [True, False])
def test_the_first_import_of_jax_is_never_searched_for_garbage(is_own, monkeypatch):
    """In a process that has JAX already, what the caller made is collected as before."""
    enabled, frozen = [], []

    def runner_of(name):
        enabled.append(gc.isenabled())
        return lambda flags: frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(main_file, "runner_of", runner_of)
    if is_own:
        monkeypatch.delitem(sys.modules, "jax")
    before = gc.get_freeze_count()
    try:
        assert main(["doctor"]) == 0
    finally:
        gc.unfreeze()
    assert enabled == [not is_own] and (frozen[0] > before) == is_own
    assert gc.isenabled()


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(f"  {name:<10}  {what}" in lines for name, what in COMMANDS.items())


def test_an_error_in_the_users_function_is_no_finding_of_a_check(tmp_path, monkeypatch, capsys):
    """Status 1 says that something differs; a traceback comes with another one."""
    (tmp_path / "program.py").write_text("def make():\n    raise KeyError('mine')\n")
    for command in ("parity", "audit"):
        monkeypatch.setattr(sys, "argv", ["jaxshard", command, f"{tmp_path}/program.py:make"])
        assert main() == 70
        assert capsys.readouterr().err.rstrip().endswith("KeyError: 'mine'")


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["nonsense"], "jaxshard: there is no command 'nonsense'; there are train, generate, launch, audit, "),
        (["trian", "--steps", "2"], "jaxshard: there is no command 'trian'; did you mean train?"),
        ([], "jaxshard: name a command; there are train, generate, launch, audit, "),
    ],
)
def test_a_command_that_does_not_exist_ends_with_status_2_and_a_hint(args, hint, capsys):
    assert main(args) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(hint) and output.err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"usage: jaxshard {command}") and output.err == ""
    if command == "train":
        assert [size for size in js.models.SIZES if size not in output.out] == []


SHARED = ["--mesh", "--strategy", "--engine", "--schedule", "--chunks", "--devices", "--microbatches", "--json"]


def test_shared_flags_are_described_alike(capsys):
    """Each line of help that several commands show is the same in all of them."""
    texts = []
    for command in ("train", "audit", "parity"):
        main([command, "--help"])
        shown = capsys.readouterr().out
        texts.append({flag: shown[shown.index(f"\n  {flag} ") :].split()[:8] for flag in SHARED})
    assert texts[0] == texts[1] == texts[2]


def test_doctor_names_devices_versions_and_what_is_missing(monkeypatch, capsys):
    """It warns of a JAX that is newer than the tested ones, which is no failure."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in ("libtpu", "jinja2") else object())
    monkeypatch.setattr(doctor, "missing_plugin", lambda: "jax[cuda13]==9.1.0")
    monkeypatch.setattr(jax, "__version_info__", (9, 1, 0))
    monkeypatch.setattr(jax, "__version__", "9.1.0")
    assert main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert "8 simulated CPU devices" in output and f"jax         {metadata.version('jax')}" in output
    gpu = 'JAX for the NVIDIA GPU of this machine: pip install "jax[cuda13]==9.1.0"'
    templates = "jinja2, for chat templates of Hugging Face (extra hf)"
    assert f"missing: libtpu, for compiling for TPU topologies (extra tpu); {templates}; {gpu}\n" in output
    assert "tested      with JAX up to 0." in output and re.search(r"^warning: .*9\.1\.0", output, re.MULTILINE)


REQUIRES = {
    "jax": ["jaxlib<=0.10.2,>=0.10.2", 'libtpu==0.0.42.*; extra == "tpu"', 'jaxlib==0.1; extra == "ci"'],
    "jaxshard": ["jax>=0.10", 'matplotlib>=3.9; extra == "viz"', "flax>=0.12"],
}


@pytest.mark.parametrize(
    ("installed", "problems"),
    [
        ({}, []),
        ({"libtpu": "0.0.42.1", "matplotlib": "3.9"}, []),
        ({"libtpu": "0.0.50"}, ["libtpu 0.0.50 is installed, but jax[tpu] 0.10.2 needs libtpu==0.0.42.*"]),
        ({"jaxlib": "0.9"}, ["jaxlib 0.9 is installed, but jax 0.10.2 needs jaxlib<=0.10.2,>=0.10.2"]),
        ({"flax": None}, ["flax is not installed, but jaxshard 0.1.0 needs flax>=0.12"]),
    ],
)
def test_doctor_compares_with_what_packages_require(installed, problems, monkeypatch):
    versions = {"jaxshard": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"} | installed
    monkeypatch.setattr(packages, "installed_version", versions.get)
    monkeypatch.setattr(packages.metadata, "requires", REQUIRES.get)
    found = list(packages.judge_versions(["jaxshard", "jax"]))
    assert [one.what for one in found] == problems
    assert all(one.level == "broken" and one.remedy.startswith("pip install ") for one in found)


def test_doctor_writes_what_is_broken_as_json(monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    monkeypatch.setitem(sys.modules, "flax.linen", None)
    assert main(["doctor", "--json", "-"]) == 1
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["processes"] == 1 and report["hosts"][0]["facts"]["cores"] >= 1
    network, flax = report["findings"]
    assert network["level"] == flax["level"] == "broken" and "nope0" in network["what"]
    assert flax["what"].startswith("import flax.linen fails with ModuleNotFoundError: ")
    assert f"broken: {flax['what']}" in output.err and report["versions"]["jax"] == jax.__version__


def test_doctor_ends_before_a_flag_that_would_end_the_process(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_nope=1")
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert "devices     not started" in output
    assert "broken: JAX does not start: Unknown flag in XLA_FLAGS: --xla_nope=1; take that flag out" in output


SECOND_START = """
import sys, jax
from jaxshard.commands.main import main
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name.rpartition("/")[2]))
main(sys.argv[1:])
print("counts", seen.count("cache_hits"), seen.count("cache_misses"))
"""


@pytest.mark.slow
def test_a_second_start_of_train_on_eight_devices_compiles_nothing(tmp_path):
    (tmp_path / "text.txt").write_text("def one(): return 1\n" * 500)
    settings = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    flags = ["--data", tmp_path / "text.txt", "--devices", 8, "--batch", 8, "--steps", 2, "--sample", 0]

    def start(json_file):
        words = [sys.executable, "-c", SECOND_START, "train", *map(str, flags), "--json", str(tmp_path / json_file)]
        done = subprocess.run(words, env=os.environ | settings, capture_output=True, text=True, timeout=600, check=True)
        return json.loads((tmp_path / json_file).read_text())["losses"], done.stdout.split("counts")[1].split()

    first, (_, compiled) = start("first.json")
    second, (loaded, missed) = start("second.json")
    assert (loaded, missed) == (compiled, "0") and int(compiled) > 0
    assert second == first


def test_doctor_describes_the_compilation_cache(monkeypatch, tmp_path):
    one = doctor.describe_cache(jax.devices()[:1])["text"]
    assert one.startswith("off (no folder); set JAX_COMPILATION_CACHE_DIR=FOLDER")
    assert doctor.describe_cache(jax.devices())["text"] == one
    elsewhere = [SimpleNamespace(platform="cpu", process_index=index) for index in (0, 1)]
    unused = "off (no folder); it is not used on CPU devices of several processes"
    assert doctor.describe_cache(elsewhere)["text"] == unused
    (tmp_path / "step-cache").write_bytes(b"12345")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        found = doctor.describe_cache(jax.devices())
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    assert (found["folder"], found["programs"], found["bytes"]) == (str(tmp_path), 1, 5)
