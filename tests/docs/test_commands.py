"""Every command that the README and the docs print is one: its flags, names and files are checked, and it is run.

The fast tier parses all of them and runs each up to the point where it would compile, train or search. The slow tier
runs those in blocks as they are printed, in their order, in an empty folder with the files that a reader has.
"""

import os
import subprocess
import sys

import jax
import pytest

from jaxshard.commands import audit, generate, parity, prepared, schedule, search, train
from jaxshard.commands.main import COMMANDS, main
from tests.docs.pages import PAGES, name_of
from tests.docs.printed import printed_by, stories_of, why_not_accepted, write_files

WITH_COMMANDS = [page for page in PAGES if printed_by(page)]
FEWEST = 40

STORIES = {str([one.words for one in story]): story for page in PAGES for story in stories_of(page)}
"""Commands that go on with each other's files; what several pages print is run once."""

PACKAGES = {"--wandb": "wandb", "--mlflow": "mlflow", "--compile": "libtpu", "--plot": "matplotlib"}
PACKAGES |= {"step.guard.json": "libtpu", "chats.jsonl": "jinja2", "--chat": "jinja2", "hf:PATH": "tokenizers"}
"""What commands with these words need."""

NEVER_RUN = {
    "my-project --checkpoint": "an account of Weights & Biases",
    "--seq 1024 --batch 16 --steps 500": "an accelerator: half an hour of two CPU cores",
}
"""The parts of commands that no test can run as they are, and what they would need."""


class Enough(Exception):
    """A command has come to where it would build a model and compile."""


SEAMS = [
    (train, "Job"),
    (prepared, "program_of"),  # of audit and plan
    (generate, "_tokenizer"),
    (audit, "_audit_text"),
    (parity, "parity"),
    (search, "search"),
    (schedule, "plot_schedule"),
]
"""The functions of commands behind which they take long."""


@pytest.fixture(autouse=True)
def readers_folder(tmp_path, monkeypatch):
    """An empty folder, and eight devices, whose number must not be fixed by a command."""
    assert jax.device_count() == 8
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXSHARD_MEMORY", str(tmp_path))  # which `launch --max-restarts` sets
    return tmp_path


@pytest.fixture
def enough(monkeypatch):
    """Lets commands stop before they compile."""

    def stop(*args, **options):
        raise Enough

    for module, name in SEAMS:
        monkeypatch.setattr(module, name, stop)


def test_there_are_commands_of_every_kind():
    printed = [one for page in PAGES for one in printed_by(page)]
    blocks = [one for one in printed if not one.quoted]
    assert len(blocks) >= FEWEST and {one.words[0] for one in printed} == set(COMMANDS)
    assert not [part for part in NEVER_RUN if not any(part in one.text for one in blocks)]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_printed_commands_are_accepted(page, readers_folder, enough, capsys):
    """Of the part of a command that stands in a sentence the flags exist."""
    for command in printed_by(page):
        why = why_not_accepted(command)
        assert not why or (command.quoted and "there is no flag" not in why), f"{command.where}: {command.text}\n{why}"
        name, *rest = command.words[command.words.index("--") + 2 :] if "--" in command.words else command.words
        if command.quoted or name not in COMMANDS or name in ("doctor", "checkpoint", "guard"):
            continue
        if name not in ("audit", "generate"):  # which stop before they read a file
            write_files(readers_folder, [command])
        try:
            status = main([name, *rest])
        except Enough:
            status = 0
        assert status == 0, f"{command.where}: {command.text}\n{capsys.readouterr().err}"


@pytest.mark.slow(sampled=False)
@pytest.mark.parametrize("story", STORIES.values(), ids=lambda story: f"{name_of(story[0].page)} {story[0].line}")
def test_printed_commands_run(story, readers_folder):
    """As they are printed, one after the other; where a package is missing they are left out."""
    story = [one for one in story if not any(part in one.text for part in NEVER_RUN)]
    for package in {PACKAGES[word] for one in story for word in one.words if word in PACKAGES}:
        pytest.importorskip(package)
    write_files(readers_folder, story)
    for command in story:
        environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
        shell = command.text.replace("python -m jaxshard", "jaxshard")
        done = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command.where}: {command.text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
