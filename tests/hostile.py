"""150 inputs that no honest program writes: each is refused in one line, soon, and in little memory.

`python -m tests.hostile` runs all of them, each in a process of its own with 20 seconds and 2 GB, and prints what went
wrong. `python -m tests.hostile hlo` runs those whose names begin with a word.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.checks.programs.texts import FSDP, GROUPS, gather, step_text
from tests.hf.checkpoints import CASES

SECONDS, BYTES = 20, 2 << 30


class Hostile(NamedTuple):
    """One input: `words(folder)` writes its files and returns the command line.

    `harmless` marks data that is strange but has an answer: it may be accepted, and must not hang. The library
    tokenizers prints lines of its own when it `panics`.
    """

    name: str
    words: Callable[[Path], list[str]]
    harmless: bool = False
    panics: bool = False


# Programs


def _hlo(name: str, text: str, mesh: str = "data=8", *, harmless: bool = False) -> Hostile:
    def words(folder: Path) -> list[str]:
        (folder / "step.txt").write_text(text)
        return ["audit", "--hlo", str(folder / "step.txt"), "--mesh", mesh, "--strategy", "fsdp"]

    return Hostile(f"hlo {name}", words, harmless)


BAD_GROUPS = [
    "[1,200000000]<=[200000000]", "[200000000,1]<=[200000000]", "[1,8]<=[100000,100000]T(1,0)", "[1,8]<=[9]",
    "[1,99999999999999999999999]<=[8]", "[3,3]<=[8]", "[1,8]<=[8]T(1,0)", "[1,8]<=[2,4]T(0,0)", "[1,200000000]",
    "[1,8]<=[0]", "[]<=[8]", "{{0,1},{2,-3}}", "{{0,1},{2,3}", "{{0,1},{2,99999999999999999999}}", "{{0,1},{2,8}}",
    "{{0,1},{2,x}}", "{{0,1},{2,3.5}}", "{{}}", "{0,1,2,3}", "{{0,1},2}", "{{0x1,2}}",
    "mesh['a'=99999,'b'=99999] {'b'}",
    "mesh['a'=2,'b'=4] {'c'}", "mesh['a'=2,'b'=4] {'b':(0)2}", "mesh['a'=2,'b'=4] {'b':(2)0}",
    "mesh['a'=2,'b'=4], device_ids=([99999,99999]) {'b'}", "mesh['a'=2,'b'=4], device_ids=(0,1) {'b'}",
    "mesh['a'=8,'b'=8] {'b'}", "mesh['a'=-2,'b'=4] {'b'}", "V100000000", "",
]  # fmt: skip


def _calls(inner: str, depth: int = 40, first: str = "%c0") -> str:
    """A program of computations that call the one before twice; `first` is what the lowest of them calls."""
    made = f"%c0 (a: f32[8]) -> f32[8] {{\n  %a = f32[8] parameter(0)\n  ROOT %r = f32[8] {inner}\n}}\n\n"
    for at in range(1, depth + 1):
        callee = first if at == 1 else f"%c{at - 1}"
        made += f"%c{at} (a: f32[8]) -> f32[8] {{\n  %a = f32[8] parameter(0)\n"
        made += f"  %b = f32[8] call(%a), to_apply={callee}\n  ROOT %r = f32[8] call(%b), to_apply={callee}\n}}\n\n"
    lines = "%zero = f32[8] constant(0)", f"%many = f32[8] call(%zero), to_apply=%c{depth}"
    return step_text(*FSDP, *lines).replace("ENTRY", f"{made}ENTRY")


def _loop(*sums: str, limit: str = "a0") -> str:
    """A program with a loop whose limit is computed by the operations `sums`, and a collective in it."""
    body = f"""%body (c: (s32[], f32[1024,64])) -> (s32[], f32[1024,64]) {{
  %c = (s32[], f32[1024,64]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[1024,64] get-tuple-element(%c), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  {gather("x", name="inner")}
  ROOT %r = (s32[], f32[1024,64]) tuple(%j, %x)
}}

%cond (c: (s32[], f32[1024,64])) -> pred[] {{
  %c = (s32[], f32[1024,64]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %a0 = s32[] constant(3)
"""
    body += (
        "".join(f"  {line}\n" for line in sums) + f"  ROOT %less = pred[] compare(%i, %{limit}), direction=LT\n}}\n\n"
    )
    lines = (
        "%start = s32[] constant(0)",
        "%init = (s32[], f32[1024,64]) tuple(%start, %kernel)",
        "%loop = (s32[], f32[1024,64]) while(%init), condition=%cond, body=%body",
    )
    return step_text(*FSDP, *lines).replace("ENTRY", f"{body}ENTRY")


def _programs() -> Iterator[Hostile]:
    good = step_text(*FSDP)
    for groups in BAD_GROUPS:
        yield _hlo(f"groups {groups}", good.replace(GROUPS, f"replica_groups={groups}"))
    for devices in (10**11, 2**31, 10**30, 0):
        yield _hlo(f"devices {devices}", step_text(*FSDP, devices=devices), f"data={devices}")
        yield _hlo(f"devices {devices} of any mesh", step_text(*FSDP, devices=devices), "data=-1")
    reduce = f"all-reduce(%a), {GROUPS}, to_apply=%add"
    yield _hlo("calls", _calls("negate(%a)"), harmless=True)
    yield _hlo("calls of a sum", _calls(reduce))
    yield _hlo("calls in a circle", _calls(reduce, first="%c40"))
    yield _hlo("deep calls", _calls(reduce, depth=3000))
    yield _hlo("sums of sums", _loop(*(f"%a{n} = s32[] add(%a{n - 1}, %a{n - 1})" for n in range(1, 41)), limit="a40"),
               harmless=True)  # fmt: skip
    yield _hlo("a long sum", _loop(*(f"%a{n} = s32[] add(%a{n - 1}, %a0)" for n in range(1, 3001)), limit="a3000"))
    yield _hlo("a value of itself", step_text("%x = f32[1024,64] copy(%x)", gather("x")))
    yield _hlo("values in a circle", step_text("%x = f32[8] copy(%y)", "%y = f32[8] copy(%x)", gather("y")))
    yield _hlo("a value of nothing", step_text(gather("absent")))
    yield _hlo("a far dimension", good.replace("dimensions={1}", "dimensions={99999999999999999999}"))
    yield _hlo("a dimension below 0", good.replace("dimensions={1}", "dimensions={-9}"))
    yield _hlo("a far element", _loop().replace("index=1", "index=99999999999999999999"))
    yield _hlo("a far parameter", _loop().replace("parameter(2)", f"parameter({'9' * 5000})"))
    yield _hlo("many digits", good.replace("1024,64", f"{'9' * 5000},64"))
    yield _hlo("many iterations", _loop().replace("body=%body", f'body=%body, backend_config={{"known_trip_count":{{"n":"{"9" * 5000}"}}}}'))  # fmt: skip  # noqa: E501
    for tenth in range(1, 10):
        yield _hlo(f"cut at {tenth}0 %", good[: len(good) * tenth // 10])


# Models of Hugging Face

BAD_SIZES = (10**30, 10**12, -1, 0, 1.5, "12", [], {}, True)
SIZE_ENTRIES = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "intermediate_size")
BAD_ENTRIES = {
    "num_attention_heads": (10**30, 0, 7), "num_key_value_heads": (10**30, 0, 5), "head_dim": (10**12, -4, "x"),
    "rope_theta": (10**400, "x", -1), "rope_scaling": (5, "x", {"rope_type": "linear", "factor": "x"}),
    "rope_parameters": (7, {"rope_type": ["x"]}), "rms_norm_eps": ("x", -1), "architectures": (5, [[]], {"a": 1}),
    "sliding_window": (10**30, 0, "x"),
}  # fmt: skip


def _config(family: str, name: str, value: object) -> Hostile:
    model_type, entries = CASES[family]

    def words(folder: Path) -> list[str]:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type} | entries | {name: value}))
        return ["plan", f"hf:{folder}", "--mesh", "data=8", "--chip", "h100", "--batch", "8", "--estimate"]

    return Hostile(f"config {family} {name} {value!r}"[:70], words)


def _configs() -> Iterator[Hostile]:
    for name in SIZE_ENTRIES:
        for value in BAD_SIZES:
            yield _config("llama", name, value)
    for name, values in BAD_ENTRIES.items():
        for value in values:
            yield _config("mistral", name, value)
    for name, value in (("max_window_layers", "x"), ("layer_types", [{}]), ("num_hidden_layers", 10**12)):
        yield _config("qwen2", name, value)
    for name, value in (("sliding_window_pattern", "x"), ("num_hidden_layers", 10**9), ("head_dim", None)):
        yield _config("gemma3", name, value)
    for name, value in (("n_inner", "x"), ("n_inner", 32 * 10**30), ("n_layer", 10**12)):
        yield _config("gpt2", name, value)


# Flags

BAD_FLAGS = (
    "plan gpt-1m --mesh data=8 --chip h100 --batch 8000000000000000",
    "plan gpt-1m --mesh data=8 --chip h100 --seq 8000000000000000",
    "plan gpt-1m --mesh data=8 --chip h100 --change width=8000000000000000",
    "plan gpt-1m --mesh data=8 --chip h100 --change depth=1000000000",
    "plan llama-1m --mesh data=8 --chip h100 --change window=80000000000000000000",
    "plan gpt-1m --mesh data=8 --chip h100 --microbatches 8000000000000000",
    "plan gpt-1m --mesh data=99999999999 --chip h100",
    "plan gpt-1m --topology v5e:99999x99999 --mesh data=-1",
    "plan gpt-1m --topology h100:99999999x8 --mesh data=-1",
    "plan gpt-1m --topology v5e:2x2 --slices 2000000000 --mesh data=-1",
    "plan gpt-1m --devices 2000000000 --mesh data=-1 --chip h100",
    "schedule gpipe --stages 9999999999 --microbatches 4",
    "schedule interleaved_1f1b --stages 4 --microbatches 4 --chunks 9999999999",
    "generate --model gpt-1m --prompt x --length 8000000000000000",
)


def _tokenizer(name: str, change: Callable[[dict], object], *, panics: bool = False) -> Hostile:
    def words(folder: Path) -> list[str]:
        model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
        made = {"version": "1.0", "added_tokens": [], "model": model}
        change(made)
        (folder / "tokenizer.json").write_text(json.dumps(made))
        (folder / "text.txt").write_text(f"{'a' * 60}b\n" * 200)
        data = ["--data", str(folder / "text.txt"), "--tokenizer", str(folder / "tokenizer.json")]
        return ["train", "--model", "gpt-1m", *data, "--steps", "1", "--devices", "1"]

    return Hostile(f"tokenizer {name}", words, panics=panics)


def _tokenizers() -> Iterator[Hostile]:
    for token in (2**32 - 1, 2**31, 2**32, 10**30, -1, 1.5, "x"):
        yield _tokenizer(f"id {token}", lambda made, token=token: made["model"]["vocab"].update(b=token))
    for pattern in ("(a+)+c", "(?:a|a)+c", "(a*)*$b", "(", "a{99999999}"):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        panics = not pattern.endswith(("(", "}"))
        yield _tokenizer(
            f"pattern {pattern}", lambda made, split=split: made.update(pre_tokenizer=split), panics=panics
        )
    yield _tokenizer("nested", lambda made: made.update(model=json.loads("[" * 400 + "]" * 400)))
    yield _tokenizer("merges", lambda made: made["model"].update(merges=[["a", "absent"]]))


def hostile_inputs() -> list[Hostile]:
    """All inputs."""
    flags = (Hostile(f"flags {words}", lambda folder, words=words: words.split()) for words in BAD_FLAGS)
    return [*_programs(), *_configs(), *flags, *_tokenizers()]


# Running them


def complaint(one: Hostile) -> str:
    """Run one input in a process of its own; return what is wrong with the answer, or ""."""
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryFile() as errors:
        words = one.words(Path(made))
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _run(words, errors.fileno())
        while (ended := os.wait4(child, os.WNOHANG))[0] == 0:
            if time.monotonic() - started > SECONDS:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return f"still runs after {SECONDS} s"
            time.sleep(0.02)
        _, status, used = ended
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
    if used.ru_maxrss * 1024 > BYTES:
        return f"took {used.ru_maxrss / 2**20:.1f} GB"
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status) not in ((0, 1, 2) if one.harmless else (1, 2)):
        return f"ended with {status:#x}: {' | '.join(lines[-3:]) or 'in silence'}"
    if not one.harmless and not (lines and lines[-1].startswith("jaxshard: ") and (one.panics or len(lines) == 1)):
        return f"wrote {lines[-3:]}"
    return ""


def _run(words: list[str], errors: int) -> None:
    """In a child: run a command, with standard error in the file `errors`, and end the process."""
    status = 70
    with contextlib.suppress(BaseException):
        resource.setrlimit(resource.RLIMIT_DATA, (3 * BYTES, 3 * BYTES))  # JAX maps more than it uses
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(errors, 2)
        sys.argv = ["jaxshard", *words]
        from jaxshard.commands.main import main

        status = main()
        sys.stderr.flush()
    os._exit(status)


def prepare() -> None:
    """Import what every child needs; a device must not be touched before the fork."""
    os.environ.pop("RUST_BACKTRACE", None)
    import jaxshard.commands.audit
    import jaxshard.commands.plan
    import jaxshard.commands.train  # noqa: F401


if __name__ == "__main__":
    prepare()
    wanted = " ".join(sys.argv[1:])
    chosen = [one for one in hostile_inputs() if one.name.startswith(wanted)]
    wrong = 0
    for one in chosen:
        begun = time.monotonic()
        if found := complaint(one):
            wrong += 1
            print(f"{one.name[:80]}: {found[:600]} ({time.monotonic() - begun:.1f} s)", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} are refused as they should be")
    sys.exit(bool(wrong))
