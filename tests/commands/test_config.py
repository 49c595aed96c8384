"""`--config` and `--save-config`: flags in a TOML file."""

import re
from dataclasses import replace

import pytest

from jaxshard.commands.config import _OF_TRAINER, write_config
from jaxshard.commands.flags import Audit, Generate, Train
from jaxshard.commands.main import main
from jaxshard.commands.parse import flags_of, parse

RUN = """
steps = 3
lr = 1e-3
resume = true
mesh = "data=4,tensor=2"
rule = ["vocab=replicated", "mlp=tensor"]
sync-every = 4
checkpoint_every = 7
"""


@pytest.fixture
def write(tmp_path):
    """Writes a file of flags, and returns its path."""

    def written(text):
        (tmp_path / "run.toml").write_text(text)
        return str(tmp_path / "run.toml")

    return written


def test_flags_of_the_file_are_those_of_the_command_line(write):
    words = ["--steps", "3", "--lr", "1e-3", "--resume", "--mesh", "data=4,tensor=2", "--rule", "vocab=replicated"]
    words += ["--rule", "mlp=tensor", "--sync-every", "4", "--checkpoint-every", "7"]
    file = write(RUN)
    found = parse(Train, ["--config", file])
    assert found == parse(Train, [*words, "--config", write("")])


def test_a_flag_wins_over_the_file(write):
    found = parse(Train, ["--steps", "5", "--config", write(RUN), "--no-resume", "--rule", "heads=tensor"])
    assert (found.steps, found.resume, found.rule, found.lr) == (5, False, ("heads=tensor",), 1e-3)
    assert parse(Audit, ["--config", write('target = "gpt-1m"\nall = true')]).target == "gpt-1m"
    assert parse(Audit, ["llama-1m", "--config", write('target = "gpt-1m"')]).target == "llama-1m"


def test_saved_flags_are_read_again(tmp_path):
    texts = ('say "hi"\\n', "line\nbreak\ttab", "caf\u00e9 \U0001f600", "\x7f\x01", "'", "#= [x]")
    flags = Generate(model="hf:a b", prompt=texts, temperature=0.5, top_k=3, checkpoint=tmp_path / "run")
    file = tmp_path / "run.toml"
    write_config(file, flags)
    assert parse(Generate, ["--config", str(file)]) == replace(flags, config=file)


def test_a_command_saves_its_flags_before_it_works(tmp_path, monkeypatch, capsys):
    """Flags of the words and of --config; without --config and --save-config themselves."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.toml").write_text("batch = 8\nseed = 3\n")
    words = ["parity", "nope", "--config", "first.toml", "--seed", "4", "--save-config", "second.toml"]
    assert main(words) == 2
    assert "nope: there is no such size" in capsys.readouterr().err
    assert (tmp_path / "second.toml").read_text().splitlines() == ['target = "nope"', "batch = 8", "seed = 4"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stpes = 3", "jaxshard train has no flag stpes (did you mean steps?)"),
        ("temperature = 1.0", "jaxshard train has no flag temperature"),
        (
            "stpes = 3\nlearning_rate = 1.0\nlora_alpha = 16",
            "jaxshard train has no flag stpes (did you mean steps?), learning_rate (did you mean lr?), lora_alpha (did "
            "you mean lora, as rank=8,alpha=16?)",
        ),
        ("steps = 0", "--steps 0: give a number above 0"),
        ("steps = 1.5", "--steps 1.5: give a whole number"),
        ('strategy = "fdsp"', "--strategy fdsp: did you mean fsdp? Use one of ddp"),
        ('resume = "yes"', "--resume yes: write true or false, without quotes"),
        ("resume = 1", "--resume 1: write true or false, without quotes"),
        ("wandb = true", "--wandb True: write a text or a number"),
        ("steps = [3, 4]", "--steps [3, 4]: write one value, not a list"),
        ('rule = [["mlp=tensor"]]', "--rule ['mlp=tensor']: write a text or a number"),
        ("steps = 3\nsteps = 4\nlr = 1", "this is no TOML: Cannot overwrite a value (at line 2, column 10)"),
        ("sync-every = 3\nsync_every = 4", "sync_every is given twice, with - and with _; leave one out"),
        ("[train]\nsteps = 3", "jaxshard train has no flag train"),
        ("[steps]\nof = 3", "steps is a table; write steps = VALUE"),
        ('mesh = ""', "--mesh '' is empty"),
        ("steps = ", "this is no TOML: Invalid value"),
        ('config = "other.toml"', "jaxshard train has no flag config"),
    ],
)
def test_what_the_file_says_is_refused_as_on_the_command_line(text, message, write, capsys):
    file = write(text)
    assert main(["train", "--config", file]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"jaxshard: (--config )?{re.escape(file)}: {re.escape(message)}", line)


def test_names_of_other_trainers_lead_to_flags(capsys):
    for name, flag in _OF_TRAINER.items():
        assert flag.partition(",")[0].replace("-", "_") in flags_of(Train), name
    assert main(["train", "--learning-rate", "1e-4"]) == 2
    assert "there is no flag --learning-rate; did you mean --lr?" in capsys.readouterr().err
    assert main(["train", "--report-to", "wandb"]) == 2
    assert "there is no flag --report-to; did you mean --wandb, tensorboard or mlflow?" in capsys.readouterr().err
    assert main(["plan", "gpt-1m", "--max-grad-norm", "1"]) == 2  # plan has no --clip
    assert "--clip" not in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["train", "--config", str(tmp_path / "absent.toml")]) == 2
    assert capsys.readouterr().err == f"jaxshard: {tmp_path / 'absent.toml'}: No such file or directory\n"
