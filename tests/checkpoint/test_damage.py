"""Whatever is done to a file of a step is refused by its name before an array is read, and the step before is taken."""

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxshard as js
from jaxshard.checkpoint import reader
from jaxshard.checkpoint.checksums import list_files
from jaxshard.checkpoint.manifest import MANIFEST
from jaxshard.commands.main import main
from tests.checkpoint.small import layout, new_run


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A folder with steps 10 and 20, of which 20 is to be damaged, and the runs."""
    root, run, later = tmp_path_factory.mktemp("damage") / "run", new_run(10), new_run(20)
    js.save(root, run, layout())
    js.save(root, later, layout())
    return root, run, later


def names_of(root):
    return [*list_files(root / "20"), MANIFEST]


class Loads:
    """Stands before the reader of arrays, and counts."""

    def __init__(self, monkeypatch):
        self.folders, load = [], reader.loading.load_arrays
        monkeypatch.setattr(
            reader.loading, "load_arrays", lambda *args: (self.folders.append(args[0].parent.name), load(*args))[1]
        )


EDITS = st.tuples(
    st.integers(0),
    st.sampled_from(["byte", "insert", "delete", "cut", "lose", "add", "folder", "swap"]),
    st.integers(0),
)


def edit(root, names, kind, number, place, more):
    """Does something to one of these files; the name under which it is told."""
    name = names[number % len(names)]
    file = root / "20" / name
    before = file.read_bytes()
    at = place % max(1, len(before))
    match kind:
        case "byte" if before:
            file.write_bytes(before[:at] + bytes([before[at] ^ (1 + place % 255)]) + before[at + 1 :])
        case "insert" | "byte":
            file.write_bytes(before[:at] + more + before[at:])
        case "delete" if before:
            file.write_bytes(before[:at] + before[at + 1 + place % 7 :])
        case "cut" if before:
            file.write_bytes(before[:at])
        case "add":
            name = f"{name}.{place % 10}"
            (root / "20" / name).write_bytes(more)
        case "folder":
            file.unlink()
            file.mkdir()
        case "swap" if before != (other := root / "20" / names[(number + 1 + place) % len(names)]).read_bytes():
            file.write_bytes(other.read_bytes())
        case _:
            file.unlink()
    return name


def check_edits(steps, tmp_path_factory, edits, loads, more):
    """On a copy, which has one thing or several wrong: one of them is named."""
    root = tmp_path_factory.mktemp("edited") / "run"
    shutil.copytree(steps[0], root)
    there, names = names_of(root), []
    for number, kind, place in edits:
        touched = there[number % len(there)]
        names.append(edit(root, there, kind, number, place, more))
        there.remove(touched)  # or the next one might undo it
        if MANIFEST in names or kind == "folder":
            break  # without a manifest nothing else is known
    try:
        with pytest.raises(ValueError, match="20") as caught:
            js.restore(root, layout(), step=20)
        told = str(caught.value).replace(f"{MANIFEST} is missing", f"{MANIFEST}: missing")
        named = [name for name in names if f"{root / '20' / name}: " in told]
        assert MANIFEST in named if MANIFEST in names else sorted(set(named)) == sorted(set(names)), (names, told)
        assert js.latest_step(root, intact=True) == 10 and loads.folders == []
        assert main(["checkpoint", "verify", str(root)]) == 1
        if "folder" in {kind for _, kind, _ in edits}:  # the oddest damage: a save replaces it as any other
            js.save(root, steps[2], layout())
            assert js.latest_step(root, intact=True) == 20
    finally:
        shutil.rmtree(root)


@given(edits=st.lists(EDITS, min_size=1, max_size=3), more=st.binary(min_size=1, max_size=20))
@settings(max_examples=4, deadline=None)
def test_any_edit_is_refused(steps, tmp_path_factory, edits, more):
    with pytest.MonkeyPatch.context() as patch:
        check_edits(steps, tmp_path_factory, edits, Loads(patch), more)


@pytest.mark.slow
@given(edits=st.lists(EDITS, min_size=1, max_size=3), more=st.binary(min_size=1, max_size=20))
@settings(max_examples=500, deadline=None)
def test_many_edits_are_refused(steps, tmp_path_factory, edits, more):
    with pytest.MonkeyPatch.context() as patch:
        check_edits(steps, tmp_path_factory, edits, Loads(patch), more)
