"""What is said of a damaged step: the file, the arrays in its bytes, and what a step of another number is."""

import errno
import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxshard as js
from jaxshard.checkpoint import manifest
from jaxshard.checkpoint.checksums import find_damage, list_files
from jaxshard.checkpoint.manifest import MANIFEST, _checksum_line
from jaxshard.commands.main import main
from tests.checkpoint.runs import assert_same
from tests.checkpoint.small import at, layout, placed


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    for step in (10, 20):
        js.save(root, at(step), layout())
    return root


@pytest.fixture
def root(saved, tmp_path):
    """A copy of two good steps, to be damaged."""
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def all_files(folder):
    return [*list_files(folder), MANIFEST]


def flip(file, byte, bit):
    content = bytearray(file.read_bytes())
    content[byte] ^= 1 << bit
    file.write_bytes(content)


def test_a_step_of_another_number_is_found(root):
    shutil.rmtree(root / "20")
    (root / "10").rename(root / "20")
    assert find_damage(root / "20") == [
        f"{root / '20' / MANIFEST}: it belongs to step 10, not 20; the folder was renamed"
    ]


def test_the_arrays_in_the_damaged_bytes_are_named(root):
    folder = root / "20"
    made = manifest.read_manifest(folder)
    name, segments = next((n, s) for n, s in made.files.items() if any(part.array is not None for part in s))
    seen, start = set(), 0
    for segment in segments:
        flip(folder / name, start, 0)
        (problem,) = find_damage(folder)
        expected = "no array lies in those bytes"
        if segment.array is not None:
            seen.add(made.arrays[segment.array].path)
            expected = f"arrays: {made.arrays[segment.array].path}"
        assert problem == f"{folder / name}: its bytes are not those that were saved; {expected}"
        flip(folder / name, start, 0)
        start += segment.size
    # All arrays of a kilobyte or more; the others lie in the index.
    assert seen == {
        f"{tree}/{leaf}" for tree in ("params", "opt_state/0/mu", "opt_state/0/nu") for leaf in ("a%2Fb", "w")
    }
    (index,) = (name for name in made.files if name.startswith("arrays/state/d/"))
    flip(folder / index, 100, 1)
    assert find_damage(folder)[0].endswith("all arrays are found through it")


def test_restore_refuses_what_it_would_otherwise_read_wrong(root):
    folder = root / "20"
    made = manifest.read_manifest(folder)
    name, segments = next((n, s) for n, s in made.files.items() if any(part.array is not None for part in s))
    flip(folder / name, 1000, 6)
    array = made.arrays[segments[0].array].path
    with pytest.raises(ValueError, match=r"(?s)20: step 20 is damaged.*latest_step.*" + f"{name}.*{array}"):
        js.restore(root, layout())
    unchecked, good = js.restore(root, layout(), verify=False), js.restore(root, layout(), step=10)
    wrong = [(np.asarray(a) != np.asarray(b)).sum() for a, b in zip(_numbers(unchecked), _numbers(good), strict=True)]
    assert sum(wrong) == 1


def _numbers(run):
    return [*run.params.values(), *run.opt_state[0].mu.values(), *run.opt_state[0].nu.values()]


def test_the_newest_intact_step(root):
    assert js.latest_step(root) == js.latest_step(root, intact=True) == 20
    flip(root / "20" / list_files(root / "20")[0], 3, 3)
    assert js.latest_step(root) == 20 and js.latest_step(root, intact=True) == 10
    (root / "20" / MANIFEST).unlink()
    assert js.latest_step(root) == 10
    (root / "10" / MANIFEST).write_bytes(b"")
    assert js.latest_step(root) == 10 and js.latest_step(root, intact=True) is None


def test_a_step_that_an_earlier_version_saved_with_a_key_is_read_by_its_checksums(root):
    file = root / "20" / MANIFEST
    fields = json.loads(file.read_bytes().splitlines()[0])
    fields |= {"sha256": dict.fromkeys(fields["files"], "0" * 64), "hmac": "0" * 64}
    line = json.dumps(fields).encode() + b"\n"
    file.write_bytes(line + _checksum_line(line))
    assert_same(js.restore(root, layout()), at(20))
    assert js.latest_step(root, intact=True) == 20


def test_the_command_verifies_every_step(root, capsys):
    assert main(["checkpoint", "verify", str(root)]) == 0
    assert "step 10: intact" in (shown := capsys.readouterr().out) and "step 20: intact" in shown
    name = "arrays/state/_METADATA"
    flip(root / "10" / name, 7, 7)
    assert main(["checkpoint", "verify", str(root)]) == 1
    shown = capsys.readouterr().out
    assert "step 10: damaged" in shown and str(root / "10" / name) in shown and "step 20: intact" in shown
    assert main(["checkpoint", "verify", str(root), "--step", "20"]) == 0
    assert main(["checkpoint", "list", str(root)]) == 0
    flip(root / "10" / MANIFEST, 7, 7)
    for action in ("list", "verify"):
        capsys.readouterr()
        assert main(["checkpoint", action, str(root)]) == 1
        assert str(root / "10" / MANIFEST) in capsys.readouterr().out
    assert main(["checkpoint", "show", str(root), "--step", "10"]) == 1


def test_the_command_lists_and_shows(root, capsys):
    assert main(["checkpoint", "list", str(root), "--json", "-"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in listed["steps"]] == [10, 20]
    size = sum((root / "20" / name).stat().st_size for name in list_files(root / "20"))
    expected = {"problems": [], "arrays": 18, "files": len(all_files(root / "20")), "bytes": size, "mesh": {"data": 2}}
    assert listed["steps"][1].items() >= expected.items()
    assert main(["checkpoint", "show", str(root), "--json", "-"]) == 0
    output = capsys.readouterr()
    shown = json.loads(output.out)
    assert shown["step"] == 20 and {"path": "state/key", "shape": [2], "dtype": "key<fry>"} in shown["tree"]
    assert "params/w  float32[48, 24]" in output.err and "param  w          [48, 24]" in output.err
    (root / "20" / MANIFEST).unlink()
    assert main(["checkpoint", "show", str(root)]) == 0 and "step 10: complete" in capsys.readouterr().out
    assert main(["checkpoint", "list", str(root)]) == main(["checkpoint", "verify", str(root)]) == 1
    assert f"{root / '20' / MANIFEST}: missing" in capsys.readouterr().out


def test_files_that_can_not_be_read_are_named(root, monkeypatch):
    folder = root / "20"
    data = next(name for name in list_files(folder) if "process_0/d/" in name)
    opening = Path.open

    def broken(self, *args, **kwargs):
        if self.name == Path(data).name:
            raise OSError(errno.EIO, "Input/output error")
        return opening(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", broken)
    (problem,) = find_damage(folder)
    assert problem.startswith(f"{folder / data}: can't be read: Input/output error; arrays: params/a%2Fb, params/w")
    monkeypatch.undo()
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    assert find_damage(folder) == [f"{folder / MANIFEST}: can't be read: Is a directory"]
    assert js.latest_step(root, intact=True) == 10


def lie(folder, change):
    """Change the manifest of a step, and give it a checksum that fits."""
    made = manifest.read_manifest(folder)
    arrays = tuple(change(array) for array in made.arrays)
    manifest.write_manifest(folder / MANIFEST, made._replace(arrays=tuple(filter(None, arrays))))


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("params/w", {"shape": (48, 25)}, "it lists float32[48, 25], and written is float32[48, 24]"),
        ("params/w", {"dtype": "int32"}, "it lists int32[48, 24], and written is float32[48, 24]"),
        ("state/key", {"dtype": "uint32"}, "it lists uint32[2], and written is uint32[2, 2]"),
        ("params/none", {"shape": (1, 4)}, "missing, it lists float32[1, 4]"),
        ("params/w", None, "not in it, and written as float32[48, 24]"),
    ],
)
def test_a_manifest_that_lists_other_arrays_than_were_written_is_found(name, change, told, root, capsys):
    """A wrong shape or dtype would be read as that shape, and cast to that dtype."""

    def changed(array):
        if array.path != name:
            return array
        return None if change is None else array._replace(**change)

    lie(root / "20", changed)
    line = f"{root / '20' / MANIFEST}: {name}: {told}"
    assert find_damage(root / "20") == [line]
    assert main(["checkpoint", "verify", str(root)]) == 1
    shown = capsys.readouterr().out
    assert line in shown and "step 20: damaged" in shown and "step 10: intact" in shown
    assert js.latest_step(root, intact=True) == 10


def test_arrays_that_were_written_otherwise_are_refused_without_checksums_too(root):
    """Orbax would cast, and cut or pad."""

    _, other = placed(lambda key: {"w": jnp.ones(6)})
    js.save(root.parent / "wide", *placed(lambda key: {"w": jnp.ones(7, jnp.bfloat16)}))
    lie(root.parent / "wide" / "0", lambda a: a._replace(shape=(6,), dtype="float32") if a.path == "params/w" else a)
    for verify in (True, False):
        with pytest.raises(js.Damaged, match=r"params/w: it lists float32\[6\], and written is bfloat16\[7\]"):
            js.restore(root.parent / "wide", other, verify=verify)


@pytest.mark.parametrize("kind", ["pipe", "link", "device"])
def test_what_is_no_plain_file_is_refused_without_checksums_too(kind, root):
    (data,) = (root / "20" / name for name in list_files(root / "20") if "process_0/d/" in name)
    data.rename(root.parent / "data")
    if kind == "pipe":
        os.mkfifo(data)
    else:
        data.symlink_to(root.parent / "data" if kind == "link" else "/dev/zero")
    for verify in (True, False):
        with pytest.raises(js.Damaged, match=f"{data.name}: not a plain file"):
            js.restore(root, layout(), verify=verify)
    assert main(["checkpoint", "list", str(root)]) == 1


def test_a_huge_file_is_refused_before_it_is_read(root):
    """With holes it takes no room on the disk; TensorStore would end the process for want of memory."""
    files = [path for path in sorted((root / "20").rglob("*")) if path.is_file() and path.name != MANIFEST]
    for file in (files[0], files[-1]):
        size, name = file.stat().st_size, file.relative_to(root / "20").as_posix()
        os.truncate(file, 1 << 42)
        with pytest.raises(js.Damaged, match=f"{file.name}: {1 << 42} bytes, {size} were saved"):
            js.restore(root, layout(), verify=False)
        before = manifest.read_manifest(root / "20")
        lied = before._replace(files=before.files | {name: (manifest.Segment(1 << 42, 0, None),)})
        manifest.write_manifest(root / "20" / MANIFEST, lied)
        for verify in (True, False):
            with pytest.raises(js.Damaged, match="far more than its arrays need"):
                js.restore(root, layout(), verify=verify)
        assert main(["checkpoint", "verify", str(root)]) == main(["checkpoint", "list", str(root)]) == 1
        manifest.write_manifest(root / "20" / MANIFEST, before)
        os.truncate(file, size)
    os.truncate(root / "20" / MANIFEST, 1 << 42)
    assert "larger than" in find_damage(root / "20")[0]
