"""Damage to what Orbax and TensorStore read first, under checksums that fit: refused, or a run of the layout."""

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
import zlib

import pytest

import jaxshard as js
from jaxshard.checkpoint.manifest import MANIFEST, _checksum_line
from tests.checkpoint.small import at, layout

PROGRAM = """
    import sys
    from pathlib import Path
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    import jaxshard as js
    from tests.checkpoint.small import at, layout

    def forms(run):
        return [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(run)]

    for root in sorted(Path(sys.argv[1]).iterdir()):
        print("opens", root.name, file=sys.stderr, flush=True)  # so that a crash or a hang has a name
        try:
            run = js.restore(root, layout())
        except (ValueError, OSError):
            print("refused")
        else:
            assert forms(run) == forms(at(20))  # numbers may differ: small arrays are a part of the index
            print("restored")
"""
KINDS = [b"np.ndarray", b"scalar", b"string", b"os.system", b"\\u0000"]


def spoil(draw, step):
    """Cut a file that has no arrays, flip a bit of it, or name another kind of array in Orbax's list."""
    small = (path for path in sorted(step.rglob("*")) if path.is_file() and 0 < path.stat().st_size < 40_000)
    file = draw.choice([path for path in small if path.name != MANIFEST])
    raw = bytearray(file.read_bytes())
    match draw.randrange(3):
        case 0:
            del raw[draw.randrange(len(raw)) :]
        case 1:
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        case _:
            file = step / "arrays/state/_METADATA"
            raw = file.read_bytes().replace(b"jax.Array", draw.choice(KINDS), draw.choice([1, -1]))
    file.write_bytes(raw)


def reseal(step):
    """Write a manifest whose sizes and checksums are those of the files as they are."""
    fields = json.loads((step / MANIFEST).read_bytes().splitlines()[0])
    for name in fields["files"]:
        raw = (step / name).read_bytes()
        fields["files"][name] = [[len(raw), zlib.crc32(raw), None]]
    line = json.dumps(fields).encode() + b"\n"
    (step / MANIFEST).write_bytes(line + _checksum_line(line))


@pytest.mark.slow
def test_damage_below_the_checksums_is_refused_without_a_crash(tmp_path):
    js.save(tmp_path / "good", at(20), layout())
    for number in range(60):
        step = shutil.copytree(tmp_path / "good", tmp_path / "cases" / str(number)) / "20"
        spoil(random.Random(number), step)
        reseal(step)
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "cases")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert 20 < ended.stdout.split().count("refused") <= len(ended.stdout.split()) == 60
