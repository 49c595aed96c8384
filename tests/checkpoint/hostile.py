"""Checkpoints and safetensors files made by somebody who means harm, drawn from a seed, and a program that opens them.

    python -m tests.checkpoint.hostile FOLDER FIRST LAST

opens the cases FOLDER/<number>/ one after the other and prints a line before and after each of them, so that whoever
reads the lines knows which case a crash or a hang belongs to.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import socket
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from jaxshard.checkpoint.manifest import MANIFEST, _checksum_line

WRONG = [
    None,
    True,
    -1,
    0,
    1.5,
    2**31,
    2**63,
    10**400,
    "",
    "x",
    "../../outside/precious",
    "/etc/passwd",
    "\0",
    [],
    {},
    [[]],
]
WRONG += [[-1], [2**62, 2**62], [2**62, 0], {"": {}}, "\ud800", "\x1b[31m", ["x"] * 3, [1e308, 1e308]]
RAW = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
]
NAMES = [
    "../outside/precious",
    "/etc/passwd",
    "a/../../outside/precious",
    "arrays/../../../outside/precious",
    "manifest.json",
]
NAMES += [".", "", "arrays\\x", "arrays//x", "nul\0", "\x1b[2J", "arrays/" + "x" * 300, "CON", "~root/x"]


def seal(line: bytes) -> bytes:
    """A manifest of this line, with a checksum that fits."""
    return line + _checksum_line(line)


def flip(draw: random.Random, raw: bytes, count: int = 1) -> bytes:
    """Change some bits of it, cut it, or put something in."""
    changed = bytearray(raw)
    match draw.randrange(4):
        case 0:
            return bytes(changed[: draw.randrange(len(changed) + 1)])
        case 1:
            at = draw.randrange(len(changed) + 1)
            return bytes(changed[:at] + draw.randbytes(draw.randrange(1, 20)) + changed[at:])
        case _:
            for _ in range(count):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            return bytes(changed)


def places(tree: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in JSON."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [at] * bool(at) + [place for key, value in inner for place in places(value, (*at, key))]


def spoil(draw: random.Random, tree: Any) -> bytes:
    """JSON with a wrong value, a wrong name, a field less or a field twice."""
    place = draw.choice(places(tree))
    holder = tree
    for key in place[:-1]:
        holder = holder[key]
    match draw.randrange(6):
        case 0 | 1:
            holder[place[-1]] = draw.choice(WRONG)
        case 2:
            holder[place[-1]] = "RAW"
            return json.dumps(tree).encode().replace(b'"RAW"', draw.choice(RAW), 1)
        case 3 if isinstance(holder, dict):
            holder[draw.choice(NAMES)] = holder.pop(place[-1])
        case 4 if isinstance(holder, dict):
            one = json.dumps(place[-1]).encode() + b": "
            return (
                json.dumps(tree).encode().replace(one, one + json.dumps(draw.choice(WRONG)).encode() + b", " + one, 1)
            )
        case _:
            del holder[place[-1]]
    return json.dumps(tree).encode()


def put_odd_file(draw: random.Random, file: Path, outside: Path) -> str:
    """Put something in the place of a file that is no plain file, or a huge one."""
    copy = outside / "copy"
    file.rename(copy) if file.exists() else copy.write_bytes(b"")
    kind = draw.choice(["pipe", "folder", "loop", "dangling", "zero", "random", "link", "socket", "huge", "terminal"])
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "socket":
            with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(file.parent):
                made.bind(file.name[:60])
        case "huge":
            file.write_bytes(copy.read_bytes())
            os.truncate(file, 1 << 42)  # it has holes
        case _:
            link = {"loop": file.name, "dangling": "nowhere", "zero": "/dev/zero", "random": "/dev/urandom"}
            file.symlink_to({"link": copy, "terminal": "/dev/tty"}.get(kind) or link[kind])
    return kind


def spoil_checkpoint(draw: random.Random, root: Path, outside: Path) -> str:
    """Do one harmful thing to step 20 of a folder; what it was."""
    step = root / "20"
    manifest = step / MANIFEST
    line = manifest.read_bytes().splitlines(keepends=True)[0]
    files = sorted(path for path in step.rglob("*") if path.is_file())
    kind = draw.choice(
        ["manifest", "sealed", "fields", "fields", "fields", "lie", "odd", "odd", "cut", "index", "orbax", "link"]
    )
    match kind:
        case "manifest":
            manifest.write_bytes(flip(draw, manifest.read_bytes()))
        case "sealed":
            manifest.write_bytes(seal(flip(draw, line[:-1]) + b"\n"))
        case "fields":
            manifest.write_bytes(seal(spoil(draw, json.loads(line)) + b"\n"))
        case "lie":
            fields = json.loads(line)
            array = draw.choice(fields["arrays"])
            shapes = [[*array["shape"], 1], array["shape"][::-1], [2**31], [2**40, 2**40], array["shape"][1:]]
            array |= (
                {"shape": draw.choice(shapes)}
                if draw.randrange(2)
                else {"dtype": draw.choice(["int32", "bfloat16", "O"])}
            )
            manifest.write_bytes(seal(json.dumps(fields).encode() + b"\n"))
        case "odd":
            kind += " " + put_odd_file(draw, draw.choice(files), outside)
        case "cut":
            file = draw.choice(files)
            file.write_bytes(flip(draw, file.read_bytes()))
        case "index" | "orbax":
            # Damage below our checksums, which fit: Orbax and TensorStore read it. The arrays' own bytes are left
            # alone: other numbers make another checkpoint, and no wrong one.
            if kind == "index" and draw.randrange(4) == 0:
                os.truncate(draw.choice(files[:-1]), 1 << 42)
                reseal(step, sums=False)
                return "huge"
            own = [file for file in files if file != manifest and file.stat().st_size < 40_000]
            file = step / "arrays/state/_METADATA" if kind == "orbax" else draw.choice(own)
            if kind == "orbax" and draw.randrange(2):
                other = draw.choice([b"np.ndarray", b"scalar", b"string", b"os.system", b"\\u0000"])
                file.write_bytes(file.read_bytes().replace(b"jax.Array", other, draw.choice([1, -1])))
            elif kind == "orbax":
                file.write_bytes(spoil(draw, json.loads(file.read_bytes())))
            else:
                file.write_bytes(flip(draw, file.read_bytes()))
            reseal(step)
        case "link":
            folder = draw.choice([step / "arrays", step / "arrays" / "state", step])
            folder.rename(outside / "moved")
            folder.symlink_to(outside / "moved")
    return kind


def reseal(step: Path, *, sums: bool = True) -> None:
    """Write a manifest whose sizes fit the files as they are, and its checksums too."""
    import zlib

    fields = json.loads((step / MANIFEST).read_bytes().splitlines()[0])
    for name in fields["files"]:
        raw = (step / name).read_bytes() if sums else b""
        size = (step / name).stat().st_size
        fields["files"][name] = [[size, zlib.crc32(raw), None]]
    (step / MANIFEST).write_bytes(seal(json.dumps(fields).encode() + b"\n"))


def spoil_safetensors(draw: random.Random, file: Path, outside: Path) -> str:
    """Do one harmful thing to a safetensors file, or to the index of several; what it was."""
    raw, index = file.read_bytes(), file.with_name(file.name + ".index.json")
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    tensors = [name for name in header if name != "__metadata__"]
    kind = draw.choice(
        ["bytes", "header", "header", "header", "length", "offsets", "offsets", "lie", "odd", "index", "index", "shard"]
    )

    def write(text: bytes, length: int | None = None) -> None:
        text += b" " * (-len(text) % 8)
        file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + raw[end:])

    match kind:
        case "bytes":
            file.write_bytes(flip(draw, raw))
        case "header":
            write(spoil(draw, header))
        case "length":
            write(raw[8:end], draw.choice([0, 1, 7, end, len(raw), 2**31, 10**8, 10**8 + 1, 2**63, 2**64 - 1]))
        case "offsets":
            place = header[draw.choice(tensors)]["data_offsets"]
            place[:] = draw.choice(
                [
                    place[::-1],
                    [0, place[1]],
                    [place[0] - 8, place[1] - 8],
                    [place[0], 2**62],
                    [-8, 0],
                    [place[0]] * 2,
                    [0, len(raw)],
                ]
            )
            write(json.dumps(header).encode())
        case "lie":
            one = header[draw.choice(tensors)]
            one |= draw.choice(
                [{"dtype": "I32"}, {"dtype": "F64"}, {"dtype": "O"}, {"shape": [2**32, 2**32]}, {"shape": [1]}]
            )
            write(json.dumps(header).encode())
        case "odd":
            kind += " " + put_odd_file(draw, file, outside)
        case "index" | "shard":
            shard = file.with_name("model-1.safetensors")
            file.rename(shard)
            names = [*NAMES, str(outside / "precious"), "../outside/model.safetensors", "none.safetensors", index.name]
            fields = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, shard.name)}
            if kind == "shard":
                kind += " " + put_odd_file(draw, draw.choice([shard, index]), outside)
            elif draw.randrange(2):
                fields["weight_map"][draw.choice(tensors)] = draw.choice(names)
            if not index.exists() and not index.is_symlink():
                index.write_bytes(
                    spoil(draw, fields) if kind == "index" and draw.randrange(2) else json.dumps(fields).encode()
                )
    return kind


def make_case(folder: Path, good: Path, number: int, seed: int) -> str:
    """Make one case below `folder`: every third one a safetensors file, the others checkpoints; what it is."""
    draw = random.Random(f"{seed} {number}")
    outside = folder / "outside"
    outside.mkdir(parents=True)
    (outside / "precious").write_bytes(b"as it was")
    if number % 3 == 0:
        shutil.copy(good / "model.safetensors", folder / "model.safetensors")
        shutil.copy(good / "model.safetensors", outside / "model.safetensors")
        return "safetensors: " + spoil_safetensors(draw, folder / "model.safetensors", outside)
    shutil.copytree(good / "run", folder / "run")
    return "checkpoint: " + spoil_checkpoint(draw, folder / "run", outside)


def state_of(folder: Path) -> dict[str, str]:
    """What lies in a folder: enough of it to notice any change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        huge = about.st_size > 1 << 30 or not path.is_file() or path.is_symlink()
        found[str(path)] = f"{about.st_mode} {about.st_size} " + (
            "" if huge else hashlib.sha256(path.read_bytes()).hexdigest()
        )
    return found


def attempt(name: str, call: Any, check: Any) -> str:
    """Call it: "refused", "same" if what it returned is what had been saved, or what is wrong."""
    try:
        result = call()
    except (ValueError, OSError):
        return "refused"
    except BaseException:
        return f"WRONG {name}: {traceback.format_exc()[-1500:]}"
    try:
        check(result)
    except BaseException as error:
        return f"WRONG {name}: accepted, and {type(error).__name__}: {str(error)[:300]}"
    return "same"


def run_command(*arguments: str) -> int:
    """Run `jaxshard checkpoint`; what it prints must be harmless to a terminal."""
    from jaxshard.commands.main import main

    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        status = main(["checkpoint", *arguments])
    assert "\x1b" not in shown.getvalue(), "it prints control characters"
    assert status in (0, 1, 2), status
    return status


def open_case(folder: Path) -> list[str]:
    """Open one case in every way, and see to it that nothing changed; what came of each way."""
    import jax
    import numpy as np

    import jaxshard as js
    from tests.checkpoint.runs import assert_same
    from tests.checkpoint.small import at, layout

    def same_model(model: Any) -> None:
        run = js.logical(at(0), layout())
        got, want = jax.tree.leaves(model), jax.tree.leaves(js.Model(run.params, run.state))
        for a, b in zip(got, want, strict=True):
            words = jax.random.key_data if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key) else lambda x: x
            assert a.dtype == b.dtype and np.asarray(words(a)).tobytes() == np.asarray(words(b)).tobytes()

    before = state_of(folder)
    if (root := folder / "run").exists():
        read = lambda **more: lambda: js.restore(root, layout(), step=20, **more)  # noqa: E731
        done = [attempt("restore", read(), lambda run: assert_same(run, at(20)))]
        done.append(attempt("restore unverified", read(verify=False), lambda _: None))
        for name in ("list", "show", "verify"):
            done.append(attempt(name, partial(run_command, name, str(root)), lambda _: None))
        newest = lambda: js.latest_step(root, intact=True)  # noqa: E731
        # What only `restore` finds: Orbax's own lists with checksums that fit, and lies about arrays without elements.
        possible = (20,) if done[0] == "same" else (10, 20)
        done.append(attempt("latest_step", newest, partial(_one_of, possible)))
    else:
        path = folder / "model.safetensors"
        done = [attempt("load", lambda: js.load_safetensors(path, layout()), same_model)]
        if path.is_file() and path.stat().st_size < 1 << 20:
            done.append(attempt("from_bytes", lambda: js.from_bytes(path.read_bytes(), layout()), same_model))
    changed = {name: (before.get(name), now) for name, now in state_of(folder).items() if before.get(name) != now}
    if changed or before.keys() - state_of(folder).keys():
        done.append(f"WRONG touched: {changed}")
    if root.exists():
        safe = {name: state for name, state in before.items() if "/outside/" in name}
        done.append(attempt("save", lambda: js.save(root, at(20), layout()), lambda _: None))
        if state_of(folder / "outside") != safe:
            done.append("WRONG save touched what lies outside")
    return done


def _one_of(possible: tuple[int, ...], found: Any) -> None:
    assert found in possible, f"{found}, expected one of {possible}"


if __name__ == "__main__":
    base, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    import jax as _jax

    _jax.config.update("jax_num_cpu_devices", 2)
    for case in range(first, last):
        print(f"begin {case}", flush=True)
        print(json.dumps([case, open_case(base / str(case))]), flush=True)
