"""Command lines that can't be meant, drawn over all commands and flags: one line, no status 0, no traceback.

Every one has exactly one thing wrong with it. A flag's values are texts that its reader refuses, and those of WRONG.
"""

import random

import numpy as np
import pytest

from jaxshard.commands.errors import UsageError
from jaxshard.commands.flags import COMMANDS as FLAGS
from jaxshard.commands.main import COMMANDS, main
from jaxshard.commands.parse import flags_of

COUNT = 300

HUGE = "9" * 25
JUNK = ["0", "-1", "x", "1.5", "", "nan", "inf", "-inf", HUGE, "-" + HUGE, "1e3", str(2**63), "FSDP", "None,"]
FILES = ["/nonexistent/x", "/proc/x", ".", "text.txt/x", "text.txt/../x"]
FOLDERS = ["text.txt", "text.txt/x", "/proc/x", "/dev/null"]
TARGETS = [
    "nope", "nope.py:f", "good.py:nope", "good.py", "x.y:z", ":", "a:b:c", "..:x", "good.py:a_number", "good.py:make()",
    "hf:", "hf:/nonexistent", "hf:text.txt", "",
]  # fmt: skip
TINY = ["--steps", "1", "--batch", "8", "--seq", "8", "--sample", "0", "--data", "text.txt"]

WRONG = {
    "mesh": ["x", "data=0", "data=3,data=1", "data==8", "data=-2", "model=8", "data=8x", ",", f"data={HUGE}",
             "data=-1,pipe=-1", "data=-1,context=0", "data=-1,context=2,context_heads=2"],
    "rule": ["vocab", "vocab=", "vocab=x", "=tensor", "vocab=replicated"],
    "engine": ["pipelined"],
    "schedule": ["nope", "missing.csv", "gpipe"],
    "sync_warmup": ["2"],
    "outer": ["average", "adam", "rate=x", "rate=0", "momentum=0.5", "rate=1,momentum=1"],
    "context": ["gather", "usp"],
    "devices": ["99999999999"],
    "microbatches": ["100000"],
    "wire": ["int8", "gradients", "gradients=int4", "weights=", "block=128", "gradients=int8,block=1",
             "weights=int8,feedback=on"],
    "model": ["nope", "gpt-1m ", "hf:", "hf:/nonexistent", "hf:text.txt"],
    "change": ["depth", "dept=2", "depth=x", "depth=0", "depth=1.5", "depth=2,depth=2", "heads=5", "seq=1:2"],
    "tokenizer": ["/nonexistent", "text.txt", "."],
    "template": ["x", "{role}", "{content}{content}", "{content}"],
    "data": ["/nonexistent", "empty.txt", "renamed.npy", "broken.npy", "ids.bin"],
    "dtype": ["S", "i4,,", "uint16"],
    "vocab": ["3"],
    "remat": ["qkv", "qkv=", "=save", "qkv=save,", "qkv=save,qkv=save", "qkv=keep", "qvk=save", "block_in=remat"],
    "batch": ["7"],
    "optimizer": ["adamm", "lion,b3=1", "sgd,momentum", "adamw,b1=x", "sgd,nesterov=3"],
    "bad_steps": ["rollback"],
    "lora": ["8", "rank", "rank=0", "rank=x", "rank=8", "rank=8,rank=8", "alpha=2", "rank=8,base=f16"],
    "export": FOLDERS,
    "train checkpoint": [*FOLDERS, "full", "az://bucket/run"],
    "generate checkpoint": ["/nonexistent", "text.txt", "az://bucket/run"],
    "memory_every": ["1"],
    "tensorboard": FOLDERS,
    "profile": FOLDERS,
    "prompt_tokens": ["x", "1,,2", "-1", "256", "1.5"],
    "length": ["99"],
    "top_k": ["2"],
    "top_p": ["0.5"],
    "temperature": ["-1"],
    "hlo": ["/nonexistent", "text.txt", "."],
    "topology": ["x", "v5e", "v5e:x", "v5e:3x3"],
    "slices": ["3"],
    "chip": ["x", "v55", "a1000"],
    "config": ["/nonexistent", "text.txt", "."],
    "stages": ["1000000000"],
    "step": ["7"],
}  # fmt: skip
"""Texts that a flag's reader takes, and that can't be meant."""

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
    flags = [(command, flag) for command in COMMANDS for flag in named_flags(command)]
    if number < len(flags):
        command, flag = flags[number]
        return with_flag(command, flag, rng)
    command = rng.choice([*COMMANDS, *["train"] * 3])
    kind = rng.randrange(4)
    if kind == 0:
        return with_flag(command, rng.choice(named_flags(command)), rng)
    if kind == 1 and command in ("audit", "parity", "plan", "search"):
        return [command, rng.choice(TARGETS)]
    if kind == 1 and command == "checkpoint":
        return [command, *rng.choice([["look", "runs"], ["list", "absent"], ["list"], ["show", "text.txt"], []])]
    if kind == 1 and command == "launch":
        return [
            command,
            *rng.choice([["--", "true"], ["-n", "1"], ["-n", "1", "--"], ["-n", "1", "--", "no-such-program"]]),
        ]
    if kind == 2:
        flag = str(rng.choice(named_flags(command)))
        wrong = flag[:-1] + rng.choice("zx") if flag.startswith("--") else "-z"
        return [command, *GOOD[command], wrong, *(["1"] if rng.random() < 0.5 else [])]
    wrong = rng.choice(["--bogus", "--bogus=1", "-q", "extra", "\N{HALFWIDTH KATAKANA LETTER A}", "--=", "-"])
    words = [command, *GOOD[command], wrong]
    return words if command != "launch" else [command, wrong]


def named_flags(command):
    return [flag for flag in flags_of(FLAGS[command]).values() if not flag.kind.is_positional]


def values_of(command, flag):
    """The wrong values of a flag: those of the table, and those that its reader refuses."""
    if flag.is_switch:
        return ["x"]
    own = WRONG.get(flag.name, WRONG.get(f"{command} {flag.name}", FILES if flag.kind.is_written else []))
    return [*own, *(text for text in JUNK if is_refused(flag, text))]


def is_refused(flag, text):
    try:
        flag.read(text)
    except UsageError:
        return True
    return False


def with_flag(command, flag, rng):
    value, name, words = rng.choice(values_of(command, flag)), str(flag), list(GOOD[command])
    if flag.kind.alias and rng.random() < 0.5:
        name = flag.kind.alias
    for given in {str(flag), flag.kind.alias} & {*words}:  # its right value goes
        at = words.index(given)
        del words[at : at + 2]
    shape = rng.randrange(5)
    if shape == 0 and not flag.is_switch:
        given = [name]  # its value is missing, for it is the last word
    elif shape == 1 and name.startswith("--"):
        given = [f"{name}={value}"]
    else:
        given = [name, value]
    if command == "train" and flag.name in ("dtype", "vocab") and "--data" in words:
        words = [word for word in words if word not in ("--data", "text.txt")]
    if command == "launch":
        return [command, *words, *given, *([] if shape == 0 else ["--", "true"])]
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
