"""A key finds what was changed on purpose: the manifest, the files, checksums that fit, a step of another key."""

import hashlib
import json
import shutil
import zlib

import jax
import pytest

import jaxshard as js
from jaxshard.checkpoint import manifest
from jaxshard.checkpoint.checksums import list_files
from jaxshard.checkpoint.manifest import MANIFEST, Segment
from jaxshard.checkpoint.reader import describe
from jaxshard.checkpoint.signature import KEY_VARIABLE, check_key, read_key
from jaxshard.commands.main import main
from jaxshard.training.state import run_key
from tests.checkpoint.runs import assert_same
from tests.checkpoint.small import at, layout

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    js.save(root, at(10), layout(), key=KEY, data={"epoch": 2})
    js.save(root, at(20), layout(), key=KEY)
    js.save(root / "open", at(10), layout())
    shutil.move(root / "open", root.parent / "open")
    return root


@pytest.fixture
def root(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def unsigned(saved, tmp_path):
    shutil.copytree(saved.parent / "open", tmp_path / "open")
    return tmp_path / "open"


def tamper(folder, **changes):
    """Change fields of a manifest as somebody does who can write checksums."""
    manifest.write_manifest(folder / MANIFEST, manifest.read_manifest(folder)._replace(**changes))


def tamper_with_array(folder, *, sums=False):
    """Change a byte of an array and its checksum; with `sums` its SHA-256 too."""
    made = manifest.read_manifest(folder)
    (name,) = (name for name in list_files(folder) if "process_0/d/" in name)
    raw = bytearray((folder / name).read_bytes())
    raw[100] ^= 1
    (folder / name).write_bytes(raw)
    segments, start = [], 0
    for one in made.files[name]:
        segments.append(Segment(one.size, zlib.crc32(raw[start : start + one.size]), one.array))
        start += one.size
    changed = {"files": made.files | {name: tuple(segments)}}
    if sums:
        changed["sha256"] = made.sha256 | {name: hashlib.sha256(raw).hexdigest()}
    tamper(folder, **changed)
    return name


def test_what_was_saved_with_a_key_is_restored_with_it(root):
    assert_same(js.restore(root, layout(), key=KEY), at(20))
    assert describe(root, step=10, key=KEY).data == {"epoch": 2}
    assert js.latest_step(root, intact=True, key=KEY) == js.latest_step(root) == 20
    made = manifest.read_manifest(root / "20")
    assert made.sha256.keys() == made.files.keys() and KEY not in (root / "20" / MANIFEST).read_bytes()


@pytest.mark.parametrize(("key", "told"), [(None, "saved with a key, and none is given"), (OTHER, "another key")])
def test_without_the_key_or_with_another_one_it_is_refused(key, told, root):
    for refused in (
        lambda: js.restore(root, layout(), key=key),
        lambda: describe(root, key=key),
        lambda: js.latest_step(root, intact=True, key=key),
        lambda: js.save(root, at(20), layout(), key=key),
    ):
        with pytest.raises(ValueError, match=f"20: .*{told}"):
            refused()
    with pytest.raises(ValueError, match=told), js.Checkpointer(root, layout(), every=1, key=key) as checkpointer:
        checkpointer.restore()
    if key is None:
        with pytest.raises(ValueError, match=told):
            js.restore(root, layout(), verify=False)
    assert js.latest_step(root, intact=True, key=KEY) == 20, "and nothing was deleted"


def test_a_step_without_a_digest_is_refused_where_a_key_is_given(unsigned):
    for refused in (js.restore, js.Checkpointer):
        more = {} if refused is js.restore else {"every": 1}
        with pytest.raises(ValueError, match="10: this step was saved without a key"):
            made = refused(unsigned, layout(), key=KEY, **more)
            made.restore()
    with pytest.raises(ValueError, match="without a key"):
        js.latest_step(unsigned, intact=True, key=KEY)
    assert_same(js.restore(unsigned, layout()), at(10))


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"epoch": 3}},
        {"made": {}},
        {"hmac": "0" * 64},
        {"hmac": "\N{SNOWMAN}"},
        {"hmac": None},
        {"sha256": {}},
        {"hmac": None, "sha256": None},
    ],
    ids=str,
)
def test_every_change_of_the_manifest_is_found(changes, root):
    tamper(root / "20", **changes)
    with pytest.raises(ValueError, match=r"20: .*(without a key|another key|SHA-256)"):
        js.restore(root, layout(), key=KEY)
    assert js.latest_step(root, intact=True, key=KEY) == 10
    assert main(["checkpoint", "verify", str(root)]) == 1


def test_changed_arrays_with_checksums_that_fit_are_found(root, unsigned):
    name = tamper_with_array(unsigned / "10")
    js.restore(unsigned, layout())  # checksums find accidents, and nothing else
    assert name in list_files(unsigned / "10")
    tamper_with_array(root / "20")
    with pytest.raises(ValueError, match="another key, or changed by somebody"):
        js.restore(root, layout(), key=KEY)
    before = manifest.read_manifest(root / "10")
    name = tamper_with_array(root / "10", sums=True)
    with pytest.raises(ValueError, match="another key, or changed by somebody"):
        js.restore(root, layout(), step=10, key=KEY)
    manifest.write_manifest(root / "10" / MANIFEST, before)
    with pytest.raises(js.Damaged, match=f"{name}: its bytes are not those that were saved"):
        js.restore(root, layout(), step=10, key=KEY)


def test_a_file_whose_checksum_collides_is_found_by_its_sha256(root):
    """CRC-32 can be forged: four bytes are enough to give any file any checksum."""
    (data,) = (root / "20" / name for name in list_files(root / "20") if "process_0/d/" in name)
    made, raw = manifest.read_manifest(root / "20"), bytearray(data.read_bytes())
    size = next(one.size for one in made.files[data.relative_to(root / "20").as_posix()])
    old = zlib.crc32(raw[:size])
    raw[0] ^= 1
    # The checksum is linear: solve for the last four bytes of the first segment.
    base = zlib.crc32(bytes(raw[: size - 4]) + bytes(4))
    rows = [
        (zlib.crc32(bytes(raw[: size - 4]) + (1 << bit).to_bytes(4, "little")) ^ base, 1 << bit) for bit in range(32)
    ]
    wanted, solution = base ^ old, 0
    for bit in range(32):
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows = [(a ^ pivot[0], b ^ pivot[1]) if a >> bit & 1 else (a, b) for a, b in rows if (a, b) != pivot]
        if wanted >> bit & 1:
            wanted, solution = wanted ^ pivot[0], solution ^ pivot[1]
    raw[size - 4 : size] = solution.to_bytes(4, "little")
    assert zlib.crc32(raw[:size]) == old and bytes(raw) != data.read_bytes()
    data.write_bytes(raw)
    with pytest.raises(js.Damaged, match=f"{data.name}: its SHA-256 is another one"):
        js.restore(root, layout(), key=KEY)


def test_a_checkpointer_saves_with_its_key_and_goes_back_with_it(tmp_path):
    with js.Checkpointer(tmp_path, layout(), every=1, keep=2, data=lambda: {"epoch": 1}, key=KEY) as checkpointer:
        for step in (1, 2, 3):
            checkpointer(step, at(step))
        run, data = checkpointer.restore()
    assert int(run.step) == 3 and data == {"epoch": 1}
    with pytest.raises(ValueError, match="step 3 of another run is there"):
        js.save(tmp_path, at(3)._replace(key=run_key(at(3).key)), layout(), key=KEY)
    assert js.save(tmp_path, at(3), layout(), key=KEY) == tmp_path / "3"


def test_keys_that_are_none(tmp_path):
    for wrong in ("x" * 32, jax.random.key(0), 7):
        with pytest.raises(TypeError, match="key is the secret of a keyed digest, as bytes; got"):
            check_key(wrong)
    for call in (
        lambda key: js.save(tmp_path, at(1), layout(), key=key),
        lambda key: js.restore(tmp_path, layout(), key=key),
        lambda key: js.Checkpointer(tmp_path, layout(), every=1, key=key),
        lambda key: js.latest_step(tmp_path, key=key),
    ):
        with pytest.raises(ValueError, match="key has 15 bytes; give at least 16"):
            call(b"x" * 15)
    with pytest.raises(ValueError, match="leaves the files unread"):
        js.restore(tmp_path, layout(), key=KEY, verify=False)
    assert not list(tmp_path.iterdir())


def test_the_command_takes_the_key_from_a_file_or_the_environment(root, monkeypatch, capsys):
    file = root.parent / "key"
    file.write_bytes(KEY + b"\n")
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    verify = ["checkpoint", "verify", str(root)]
    assert main(verify) == 1 and "none is given" in capsys.readouterr().out
    assert main([*verify, "--key-file", str(file)]) == 0
    assert main(["checkpoint", "list", str(root)]) == 0, "who looks needs no key"
    monkeypatch.setenv(KEY_VARIABLE, OTHER.decode())
    assert main(verify) == 1 and "another key" in capsys.readouterr().out
    assert main([*verify, "--key-file", str(file)]) == 0
    monkeypatch.setenv(KEY_VARIABLE, KEY.decode())
    capsys.readouterr()
    assert main([*verify, "--json", "-"]) == 0
    assert [step["problems"] for step in json.loads(capsys.readouterr().out)["steps"]] == [[], []]
    monkeypatch.setenv(KEY_VARIABLE, "short")
    assert main(verify) == 2 and f"{KEY_VARIABLE}: key has 5 bytes" in capsys.readouterr().err
    assert main([*verify, "--key-file", str(root / "none")]) == 2
    assert read_key(file) == KEY
