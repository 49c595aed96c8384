"""The commands that the pages print, and the files that a reader has when typing them."""

import functools
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js
from jaxshard.commands.errors import UsageError
from jaxshard.commands.flags import COMMANDS
from jaxshard.commands.parse import parse
from tests.data.small_tokenizer import make_word_tokenizer
from tests.docs.pages import ROOT
from tests.hf.checkpoints import VOCAB, draw, numbers, write_tensors
from tests.plan.guard.refactorings import SOURCE

_LINE = re.compile(r"(?:\$ )?(?P<command>(?:[A-Z_]+=\S+ )*(?:python -m )?jaxshard(?= +[a-z-]+(?: |$)).*)")
_SPAN = re.compile(r"`(?P<command>jaxshard [a-z]+[^`]*)`")


_MAKE = ("--checkpoint", "--export", "--save-config", "-o")
"""Flags whose values are made by a command, and may be read by the next one."""


class Printed(NamedTuple):
    """A command of a page.

    Attributes:
      page: the page.
      line: the number of the line where it begins.
      text: the command, as a reader copies it.
      quoted: it stands in a sentence, or is the part of a command in a table.
    """

    page: Path
    line: int
    text: str
    quoted: bool = False

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables in front of the command."""
        return dict(word.split("=", 1) for word in self._words[: self._words.index("jaxshard")] if "=" in word)

    @property
    def words(self) -> list[str]:
        """The words behind `jaxshard`."""
        return self._words[self._words.index("jaxshard") + 1 :]

    @property
    def makes(self) -> set[str]:
        """The folders that the command makes and others may go on with."""
        return {after for word, after in itertools.pairwise(self.words) if word in _MAKE}

    @property
    def _words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


@functools.cache
def printed_by(page: Path) -> list[Printed]:
    """The commands in the indented and fenced blocks and in the tables of a page, and those quoted elsewhere."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found, prose, fence, at = [], [""] * len(lines), "", 0
    while at < len(lines):
        line, start = lines[at], at
        at += 1
        if line.startswith("```"):
            fence = "" if fence else line
        elif not fence and not line.startswith("    "):
            prose[start] = line
        elif not fence.startswith("```python") and (match := _LINE.fullmatch(line.strip())):
            text = match["command"]
            while text.endswith("\\"):
                text, at = text[:-1] + lines[at].strip(), at + 1
            found.append(Printed(page, start + 1, text))
    together = "\n".join(prose)
    for match in _SPAN.finditer(together):
        text, line = " ".join(match["command"].split()), together[: match.start()].count("\n") + 1
        quoted = Printed(page, line, text, quoted=True)
        is_whole = lines[line - 1].startswith("|") and len(quoted.words) > 1 and "..." not in text
        is_whole = is_whole and why_not_accepted(quoted) == ""
        found.append(quoted._replace(quoted=not is_whole))
    return sorted(found, key=lambda one: one.line)


@functools.cache
def why_not_accepted(command: Printed) -> str:
    """Return what the parser says of a command and of the one behind `launch ... --`; "" where it accepts them."""
    words = [word for word in command.words if word != "..."]
    try:
        _parse(words)
        if "--" in words and words[words.index("--") + 1] == "jaxshard":
            _parse(words[words.index("--") + 2 :])
    except UsageError as error:
        return str(error)
    return ""


def _parse(words: list[str]) -> None:
    if not {"-h", "--help"} & set(words):
        parse(COMMANDS[words[0]], words[1:])


def stories_of(page: Path) -> list[list[Printed]]:
    """Group the commands in the blocks of a page, in order: with the first that made a folder those that name it."""
    stories: list[tuple[set[str], list[Printed]]] = []
    for command in (one for one in printed_by(page) if not one.quoted):
        named = {word.removeprefix("hf:") for word in command.words}
        for made, story in stories:
            if made & named:
                made |= command.makes
                story.append(command)
                break
        else:
            stories.append((command.makes, [command]))
    return [story for _, story in stories]


def write_files(folder: Path, commands: list[Printed]) -> None:
    """Write what commands read and no command before them has made."""
    named = {word for command in commands for word in command.words}
    named |= {f"{command.words[0]} {word}" for command in commands for word in command.words}
    for name, write in FILES.items():
        if name in named:
            file = folder / name.split()[-1].partition(":")[0]
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file)
    for name in MODELS & named:
        _write_model(folder / name.removeprefix("hf:"), positions=1024 if "--seq" in named else 128)


def _write_text(file: Path) -> None:
    file.write_text((ROOT / "README.md").read_text(encoding="utf-8") * 20)


def _write_model(folder: Path, positions: int) -> None:
    """A model of one block, and its tokenizer of 96 words."""
    folder.mkdir(exist_ok=True)
    stored = numbers("llama")
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 4)
    sizes |= {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": positions}
    (folder / "config.json").write_text(json.dumps(stored["config"] | sizes))
    tensors = {name: shape for name, shape in stored["tensors"].items() if "layers." not in name or ".0." in name}
    shapes = {name: tuple(n if n == VOCAB else 16 for n in shape) for name, shape in tensors.items()}
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }} {% endfor %}")
    write_tensors(folder / "model.safetensors", {name: draw(name, shape) for name, shape in shapes.items()})
    make_word_tokenizer(folder, VOCAB)


def _write_run(folder: Path) -> None:
    words = ["train", "--model", "llama-1m", "--steps", "1", "--sample", "0", "--checkpoint", str(folder)]
    subprocess.run([sys.executable, "-m", "jaxshard", *words], check=True, capture_output=True, env=os.environ)


def _write_chats(file: Path) -> None:
    words = np.random.default_rng(0).integers(0, VOCAB - 1, (4000, 8))
    lines = [" ".join(f"w{number}" for number in row) for row in words]
    rows = [[{"role": "user", "content": line}, {"role": "assistant", "content": line}] for line in lines]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def _write_program(file: Path) -> None:
    file.write_text(_PROGRAM)


def _write_step(file: Path) -> None:
    """The text of a step of two matrices under `js.fsdp`."""

    def init_fn(key):
        return {"up": jax.random.normal(key, (64, 256)), "down": jax.random.normal(key, (256, 64))}

    def loss_fn(params, batch, key):
        errors = jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["x"]
        return js.Mean((errors**2).sum(), errors.size)

    tx, batch = optax.sgd(0.1), {"x": np.ones((32, 64), np.float32)}
    layout = js.layout(js.fsdp("fsdp"), js.make_mesh(fsdp=8), init_fn, tx)
    file.write_text(js.make_step(loss_fn, tx, layout, engine=js.explicit()).compile(batch).as_text())


_PROGRAM = """
import numpy as np
import optax

import jaxshard as js


def function():
    model = js.models.gpt(vocab=64, width=32, depth=2, heads=4, seq=16)
    return model.init, model.loss, optax.sgd(0.1), {"tokens": np.ones((16, 17), np.int32)}


make = function
"""

FILES = {
    "generate DIR": _write_run,
    "PATH": _write_text,
    "chats.jsonl": _write_chats,
    "file.py:function": _write_program,
    "model.py:make": _write_program,
    "train_step.py:make": lambda file: file.write_text(SOURCE),
    "dump/module_0012.jit_train_step.cpu_after_optimizations.txt": _write_step,
}
"""What readers have of their own, by the words of commands that name it."""

MODELS = {"hf:PATH", "hf:FOLDER", "hf:llama/"}
"""The models of Hugging Face's that they have."""
