"""Command lines that can't be meant, drawn over all commands and flags: one line, no status 0, no traceback.

Every one has exactly one thing wrong with it.
"""

import random
import re

import numpy as np
import pytest

from jaxshard.commands.main import COMMANDS, main

COUNT = 300

HUGE = "9" * 25
NUMBERS = ["0", "-1", "x", "1.5", "", "nan", HUGE, "-" + HUGE, "1e3"]
RATES = ["0", "-1", "x", "", "nan", "inf", "-inf"]
CHOICES = ["x", "", "FSDP", "None,"]
REMATS = [*CHOICES, "qkv", "qkv=", "=save", "qkv=save,", "qkv=save,qkv=save", "qkv=keep", "qvk=save", "block_in=remat"]
FILES = ["/nonexistent/x", "/proc/x", ".", "text.txt/x", "", "text.txt/../x"]
FOLDERS = ["text.txt", "text.txt/x", "/proc/x", "/dev/null", ""]
MESHES = [
    "x",
    "data=0",
    "data=3,data=1",
    "data==8",
    "data=-2",
    "model=8",
    "data=8x",
    "",
    ",",
    f"data={HUGE}",
    "data=-1,pipe=-1",
    "data=-1,context=0",
    "data=-1,context=2,context_heads=2",
]
SHARDING = {
    "--mesh": MESHES,
    "--strategy": CHOICES,
    "--rule": ["", "vocab", "vocab=", "vocab=x", "=tensor", "vocab=replicated"],
    "--engine": [*CHOICES, "pipelined"],
    "--schedule": ["nope", "missing.csv", "gpipe", ""],
    "--chunks": NUMBERS,
    "--sync-every": NUMBERS,
    "--sync-warmup": [*NUMBERS, "2"],
    "--outer": ["", "average", "adam", "rate=x", "rate=0", "momentum=0.5", "rate=1,momentum=1"],
    "--context": [*CHOICES, "gather", "usp"],
    "--devices": ["0", "-1", "x", "", "99999999999", HUGE],
    "--microbatches": [*NUMBERS, "100000"],
    "--wire": [
        "",
        "int8",
        "gradients",
        "gradients=int4",
        "weights=",
        "block=128",
        "gradients=int8,block=1",
        "weights=int8,feedback=on",
    ],
}
TARGETS = [
    "nope",
    "nope.py:f",
    "good.py:nope",
    "good.py",
    "x.y:z",
    ":",
    "a:b:c",
    "..:x",
    "good.py:a_number",
    "good.py:make()",
    "hf:",
    "hf:/nonexistent",
    "hf:text.txt",
    "",
]
CHANGES = ["", "depth", "dept=2", "depth=x", "depth=0", "depth=1.5", "depth=2,depth=2", "heads=5", "vocab=8", "seq=1:2"]
TINY = ["--steps", "1", "--batch", "8", "--seq", "8", "--sample", "0", "--data", "text.txt"]

# Words with which a command would work (each with the flag that is drawn, and its wrong value), and the flags.
GOOD = {
    "train": TINY,
    "generate": ["--model", "llama-1m", "--prompt", "a"],
    "launch": ["-n", "1"],
    "audit": ["good.py:make"],
    "plan": ["good.py:make", "--topology", "v5e:2x4"],
    "search": ["good.py:make", "--topology", "v5e:2x2"],
    "parity": ["good.py:make"],
    "schedule": ["gpipe", "--stages", "2", "--microbatches", "2"],
    "checkpoint": ["list", "runs"],
    "doctor": [],
}
FLAGS = {
    "train": SHARDING | {
        "--model": ["nope", "", "gpt-1m ", "hf:", "hf:/nonexistent", "hf:text.txt", "hf:."],
        "--change": CHANGES,
        "--tokenizer": ["/nonexistent", "text.txt", ".", "", " "],
        "--template": ["x", "", "{role}", "{content}{content}", "{content}"],
        "--data": ["/nonexistent", "empty.txt", "renamed.npy", "broken.npy", "ids.bin", "", " "],
        "--dtype": ["S", "i4,,", "uint16", ""],
        "--vocab": NUMBERS,
        "--remat": REMATS,
        "--precision": CHOICES,
        "--steps": NUMBERS,
        "--batch": [*NUMBERS, "7"],
        "--seq": NUMBERS,
        "--seed": ["-1", "x", "1.5", "", HUGE, str(2**63)],
        "--lr": RATES,
        "--optimizer": ["", "adamm", "lion,b3=1", "sgd,momentum", "adamw,b1=x", "sgd,nesterov=3"],
        "--warmup": ["-1", "x", "", "1.5", HUGE],
        "--decay": CHOICES,
        "--clip": RATES,
        "--eval-every": NUMBERS,
        "--patience": NUMBERS,
        "--bad-steps": [*CHOICES, "rollback"],
        "--check-replicas": NUMBERS,
        "--lora": ["", "8", "rank", "rank=0", "rank=x", "rank=8", "rank=8,rank=8", "alpha=2", "rank=8,base=f16"],
        "--export": FOLDERS,
        "--checkpoint": [*FOLDERS, "full", "gs://bucket/run"],
        "--checkpoint-every": NUMBERS,
        "--memory-every": [*NUMBERS, "1"],
        "--keep": NUMBERS,
        "--sample": ["-1", "x", "", "nan", HUGE],
        "--json": FILES,
        "--log": FILES,
        "--tensorboard": FOLDERS,
        "--wandb": ["", " "],
        "--mlflow": ["", " "],
        "--profile": FOLDERS,
        "--resume": ["x"],
        "--fall-back": ["x"],
        "--ordered": ["x"],
    },
    "generate": {
        "--model": ["nope", "", "gpt-1m ", "hf:/nonexistent", "hf:"],
        "--change": [x for x in CHANGES if x != "vocab=8"],
        "--checkpoint": ["/nonexistent", "text.txt", "gs://bucket/run"],
        "--prompt": [""],
        "--prompt-tokens": ["", "x", "1,,2", "-1", "256", "1.5"],
        "--tokenizer": ["/nonexistent", "text.txt", "."],
        "--length": [*NUMBERS, "99"],
        "--temperature": ["-1", "x", "nan", "inf", ""],
        "--top-k": [*NUMBERS, "2"],
        "--top-p": [*RATES, "0.5"],
        "--stop": [""],
        "--mesh": SHARDING["--mesh"],
        "--strategy": CHOICES,
        "--devices": SHARDING["--devices"],
        "--seed": ["-1", "x", "1.5", "", HUGE],
        "--json": FILES,
    },
    "launch": {"-n": NUMBERS, "--processes": NUMBERS, "--max-restarts": ["-1", "x", "", "1.5"], "--grace": [*RATES]},
    "audit": SHARDING | {
        "--hlo": ["/nonexistent", "text.txt", ".", ""],
        "--all": ["x"],
        "--change": CHANGES,
        "--batch": NUMBERS,
        "--seq": NUMBERS,
        "--remat": REMATS,
        "--precision": CHOICES,
        "--topology": ["", "x", "v5e", "v5e:x"],
        "--json": FILES,
    },
    "plan": SHARDING | {
        "--change": CHANGES,
        "--batch": NUMBERS,
        "--seq": NUMBERS,
        "--remat": REMATS,
        "--precision": CHOICES,
        "--topology": ["", "x", "v5e", "v5e:x", "v5e:3x3", "h100:0"],
        "--slices": [*NUMBERS, "3"],
        "--chip": ["", "x", "v55", "a1000"],
        "--price": RATES,
        "--estimate": ["x"],
        "--codegen": ["x"],
        "--plot": [*FILES, "a.xyz"],
        "--json": FILES,
    },
    "search": {
        "--topology": ["", "x", "v5e", "v5e:x", "v5e:3x3", "h100:0"],
        "--slices": NUMBERS,
        "--change": CHANGES,
        "--batch": NUMBERS,
        "--seq": NUMBERS,
        "--precision": CHOICES,
        "--price": RATES,
        "--compile": [number for number in NUMBERS if number != "0"],
        "--json": FILES,
    },
    "parity": SHARDING | {
        "--change": CHANGES,
        "--batch": NUMBERS,
        "--seed": ["-1", "x", "1.5", "", HUGE],
        "--json": FILES,
    },
    "schedule": {
        "--stages": NUMBERS,
        "--microbatches": [*NUMBERS, "9999999999"],
        "--chunks": [*NUMBERS, "2"],
        "--plot": [*FILES, "a.xyz"],
        "--json": FILES,
    },
    "checkpoint": {"--step": [*NUMBERS, "7"], "--json": FILES},
    "doctor": {"--json": FILES},
}  # fmt: skip
for command in ("train", "generate", "audit", "plan", "search", "parity"):
    FLAGS[command] |= {"--config": ["/nonexistent", "text.txt", ".", ""], "--save-config": FILES}
SWITCHES = {"--resume", "--fall-back", "--ordered", "--estimate", "--codegen", "--all"}

GOOD_PY = """
import jax.numpy as jnp, numpy as np, optax, jaxshard as js

a_number = 3

def make():
    def loss(params, batch, key):
        return js.Mean((batch["x"] @ params["w"]).sum(), batch["x"].shape[0])
    return lambda key: {"w": jnp.ones((8, 8))}, loss, optax.sgd(0.1), {"x": np.ones((8, 8), np.float32)}
"""


def drawn(number, rng):
    """A command line with one thing wrong; numbers below the count of all flags go through them in turn."""
    flags = [(command, flag) for command in COMMANDS for flag in FLAGS[command]]
    if number < len(flags):
        command, flag = flags[number]
        return with_flag(command, flag, rng)
    command = rng.choice([*COMMANDS, *["train"] * 3])
    kind = rng.randrange(4)
    if kind == 0 and FLAGS[command]:
        return with_flag(command, rng.choice([*FLAGS[command]]), rng)
    if kind == 1 and command in ("audit", "parity", "plan", "search"):
        return [command, rng.choice(TARGETS)]
    if kind == 1 and command == "checkpoint":
        return [command, *rng.choice([["look", "runs"], ["list", "absent"], ["list"], ["show", "text.txt"], []])]
    if kind == 1 and command == "launch":
        return [
            command,
            *rng.choice([["--", "true"], ["-n", "1"], ["-n", "1", "--"], ["-n", "1", "--", "no-such-program"]]),
        ]
    if kind == 2 and FLAGS[command]:
        flag = rng.choice([*FLAGS[command]])
        wrong = flag[:-1] + rng.choice("zx") if flag.startswith("--") else "-z"
        return [command, *GOOD[command], wrong, *(["1"] if rng.random() < 0.5 else [])]
    wrong = rng.choice(["--bogus", "--bogus=1", "-q", "extra", "\N{HALFWIDTH KATAKANA LETTER A}", "--=", "-"])
    words = [command, *GOOD[command], wrong]
    return words if command != "launch" else [command, wrong]


def with_flag(command, flag, rng):
    values = FLAGS[command][flag]
    value = rng.choice(values)
    words = list(GOOD[command])
    if flag in words:  # its right value goes
        at = words.index(flag)
        del words[at : at + 2]
    shape = rng.randrange(5)
    if shape == 0 and flag not in SWITCHES:
        given = [flag]  # its value is missing, for it is the last word
    elif shape == 1 and flag.startswith("--"):
        given = [f"{flag}={value}"]
    else:
        given = [flag, value]
    if command == "train" and flag in ("--dtype", "--vocab") and "--data" in words:
        words = [word for word in words if word not in ("--data", "text.txt")]
    if command == "launch":
        return [
            command,
            *([] if flag in ("-n", "--processes") else words),
            *given,
            *([] if shape == 0 else ["--", "true"]),
        ]
    return [command, *words, *given]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(bytes(range(32, 127)) * 200)
    (tmp_path / "good.py").write_text(GOOD_PY)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "ids.bin").write_bytes(bytes(64))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("")
    np.savez("renamed.npz", np.arange(9))
    (tmp_path / "renamed.npz").rename("renamed.npy")
    np.save("broken.npy", np.arange(9))
    (tmp_path / "broken.npy").write_bytes((tmp_path / "broken.npy").read_bytes().replace(b"(9,)", b"(9,("))
    (tmp_path / "runs" / "3").mkdir(parents=True)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_bad_invocations_end_with_one_line(seed, folder, capsys):
    rng = random.Random(seed)
    invocations = [drawn(number, rng) for number in range(COUNT)]
    assert {words[0] for words in invocations} == set(COMMANDS)
    wrong = []
    for words in invocations:
        status, error = main(words), capsys.readouterr().err
        if status not in (1, 2) or error.count("\n") != 1 or not error.startswith("jaxshard"):
            wrong.append(f"{words} ended with {status}: {error[-500:]}")
    assert not wrong, f"{len(wrong)} of {COUNT}\n" + "\n".join(wrong)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_drawn(command, capsys):
    main([command, "--help"])
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    own = {flag for flag in shown if not flag.startswith("--no-")}
    assert set(FLAGS[command]) - {"-n"} <= shown
    named = {
        "--checkpoint",
        "--resume",
        "--max-restarts",
        "--memory-every",
        "--devices",
    }  # by texts, as flags of other commands
    assert own - set(FLAGS[command]) <= named
