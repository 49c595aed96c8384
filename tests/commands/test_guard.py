"""`jaxshard guard`: status, file, Markdown, targets that do not run, and files that are damaged."""

import json
import os
import sys

import jax
import pytest

from jaxshard.commands.main import main
from tests.plan.guard.refactorings import SOURCE

TARGETS = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

WANTED = P("data")


def step(w):
    return jnp.tanh(w).sum(0)


def make(devices):
    where = NamedSharding(Mesh(np.array(devices), ("data",)), WANTED)
    return jax.jit(step), (jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=where),)


def raises(devices): raise KeyError("mine")
def nothing(devices): return None
def not_jitted(devices): return step, (1,)
def no_tuple(devices): return jax.jit(step), jnp.ones((4, 4))
def no_devices(): return 1
def own_devices(devices): return make(jax.devices()[:4])
def too_few(devices): return make(np.array(devices).reshape(16))
def wrong_shape(devices): return jax.jit(lambda x: x @ jnp.ones((3, 4))), (jnp.ones(7),)
def refused(devices):
    where = NamedSharding(Mesh(np.array(devices), ("data",)), P("data"))
    big = jax.ShapeDtypeStruct((1 << 20, 1 << 14), jnp.float32, sharding=where)
    return jax.jit(lambda x: jnp.tanh(x).sum(0) @ x.T), (big,)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "guarded.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "guarded", raising=False)
    assert jax.device_count() == 8
    yield tmp_path
    sys.modules.pop("guarded", None)


def guard(*words):
    return main(["guard", *words])


def test_a_step_is_recorded_and_a_change_has_status_1(folder, capsys):
    assert guard("record", "guarded.py:make") == 0
    assert "recorded in step.guard.json: cpu:8" in capsys.readouterr().out
    assert guard("check") == 0
    assert "cpu:8: as recorded" in capsys.readouterr().out
    (folder / "guarded.py").write_text(TARGETS.replace('WANTED = P("data")', "WANTED = P()"))
    sys.modules.pop("guarded")
    assert guard("check", "--markdown", "comment.md", "--json", "result.json") == 1
    sentence = (
        "1 of the arrays of the batch, f32[64,64], stored replicated, 16.38 kB on each device, where stored split over "
        "data (dimension 0), 2.05 kB"
    )
    assert f"- {sentence}: w\n" in capsys.readouterr().out
    assert f"- **{sentence}** (`w`): check the rules" in (folder / "comment.md").read_text()
    result = json.loads((folder / "result.json").read_text())
    assert not result["ok"] and result["targets"][0]["changes"][0]["text"] == sentence
    assert guard("record") == 0  # the file names the target
    assert guard("check") == 0


def test_the_file_is_short_and_the_same_again(folder):
    assert guard("record", "guarded.py:make") == 0
    text = (folder / "step.guard.json").read_text()
    assert '{"axis": "data", "kind": "all-reduce", "moves": "activation", "array": "f32[64]", "count": 1, ' in text
    assert len(text.splitlines()) < 40 and str(folder) not in text
    assert guard("record", "guarded.py:make") == 0
    assert (folder / "step.guard.json").read_text() == text


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_file.py:make", "the file no_file.py does not exist"),
        ("no_such_module:make", "there is no module 'no_such_module'"),
        ("guarded.py:no_function", "guarded has no function 'no_function', its functions are step, make"),
        ("guarded.py:raises", "guarded.py:raises does not run: KeyError: 'mine'"),
        ("guarded.py:nothing", "got NoneType; return (step, batch) of a js.Step, or (jitted, arguments)"),
        ("guarded.py:not_jitted", "the first is function, which can't be traced; wrap it in jax.jit"),
        ("guarded.py:no_tuple", "the arguments are ArrayImpl; return"),
        ("guarded.py:no_devices", "no_devices can't be called with 1 arguments"),
        ("guarded.py:too_few", "does not run: ValueError: cannot reshape array of size 8"),
        ("guarded.py:wrong_shape", "does not run: TypeError: dot_general requires"),
        ("", "name what is guarded: module:function"),
        ("guarded.py", "guarded.py: this is no HLO text"),
    ],
)
def test_a_target_that_does_not_run_has_status_2(folder, capsys, target, message):
    assert guard("record", *[target] * bool(target)) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "step.guard.json").exists()


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("v5e:2x3", "v5e is not rented as 2x3; near it are v5e:2x4"),
        ("v9:2x2", "'v9' is none of v4, v5e"),
        ("0 x v5e:2x2", "no topology '0 x v5e:2x2'"),
        ("cpu:x", "no topology 'cpu:x'"),
        ("cpu:16", "--devices 16: there are 8 cpu device(s)"),
        ("gpu:8", "gpu:8 is wanted, and the program is for cpu:8"),
    ],
)
def test_devices_that_are_not_there_are_refused(folder, capsys, topology, message):
    assert guard("record", "guarded.py:make", "--topology", topology) == 2
    assert message in capsys.readouterr().err


def test_without_libtpu_the_command_that_installs_it_is_named(folder, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    assert guard("record", "guarded.py:make", "--topology", "v5e:2x4") == 2
    assert f'libtpu is not installed; pip install "jax[tpu]=={jax.__version__}"' in capsys.readouterr().err


@pytest.mark.tpu
@pytest.mark.slow
def test_slices_and_other_devices_and_too_little_memory(folder, capsys):
    assert guard("record", "guarded.py:make", "--topology", "v5e:2x2,2 x v5e:2x2") == 0
    assert guard("check") == 0
    assert "\n2 x v5e:2x2: as recorded" in capsys.readouterr().out
    assert guard("record", "guarded.py:own_devices", "--topology", "v5e:2x2") == 2
    assert "the arguments are on 4 x cpu, not on v5e:2x2: make their mesh of the devices" in capsys.readouterr().err
    assert guard("record", "guarded.py:refused", "--topology", "v5e:2x2") == 2
    assert "nothing is recorded, since the compiler refuses the program for v5e:2x2" in capsys.readouterr().err


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "of_the_file.py").write_text(TARGETS)
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert guard("record", "of_the_file.py:make") == 0
        return (folder / "step.guard.json").read_text()
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (None, "", "it does not begin with a brace"),
        (None, '{"name": "package.json"}', "its format is None, this version of jaxshard reads 1"),
        (None, "\0" * 100, "it does not begin with a brace"),
        ('"guard": 1', '"guard": 2', "its format is 2, this version of jaxshard reads 1"),
        ('"count": 1', '"count": "1"', "cpu:8: collectives: 'count' is '1'"),
        ('"count": 1', '"count": -1', "'count' is -1"),
        ('"count": 1, ', "", "cpu:8: collectives: Moved.__init__() missing 1 required positional argument: 'count'"),
        ('"count": 1', '"count": 1, "more": 1', "unexpected keyword argument 'more'"),
        ('"programs": 1', '"programs": 1e999', "1e999 is no finite number"),
        ('"mesh": {"data": 8}', '"mesh": {"data": "8"}', "'mesh' is"),
        ('"refusal": ""', '"refusal": "', "Invalid control character"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(folder, capsys, recorded, old, new, message):
    (folder / "step.guard.json").write_text(new if old is None else recorded.replace(old, new, 1))
    assert guard("check", "guarded.py:make") == 2
    err = capsys.readouterr().err
    assert "step.guard.json is no file of a guard, or is damaged" in err
    assert message in err and "record it again" in err


def test_a_file_that_is_absent_or_lacks_the_devices(folder, capsys, recorded):
    assert guard("check", "guarded.py:make") == 2
    assert "step.guard.json: No such file or directory" in capsys.readouterr().err
    (folder / "step.guard.json").write_text(recorded)
    assert guard("check", "guarded.py:make", "--topology", "cpu:4") == 2
    assert "step.guard.json has no record for cpu:4, but for cpu:8; record cpu:4 too" in capsys.readouterr().err


def test_a_file_of_hlo_text(folder, capsys):
    where = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
    lowered = jax.jit(lambda x: (x * x).sum(0)).lower(jax.ShapeDtypeStruct((64, 64), "float32", sharding=where))
    text = lowered.compile().as_text()
    (folder / "step.hlo").write_text(text)
    assert guard("record", "step.hlo") == 2
    assert "step.hlo: give --mesh, the sizes of its 8 devices' mesh axes" in capsys.readouterr().err
    assert guard("record", "step.hlo", "--mesh", "data=8") == 0
    assert guard("check") == 0
    assert "text: as recorded" in capsys.readouterr().out
    for wrong, message in ((text[:-300], "the text is cut off"), (lowered.as_text(), "this is StableHLO")):
        (folder / "step.hlo").write_text(wrong)
        assert guard("check") == 2
        assert f"step.hlo: {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_another_compiler_is_compared_by_totals_alone(folder, capsys):
    (folder / "guarded.py").write_text(SOURCE)
    assert guard("record", "guarded.py:make") == 0
    file = folder / "step.guard.json"
    file.write_text(file.read_text().replace(f"jaxlib {jax.lib.__version__}", "jaxlib 0.0.1"))
    assert guard("check") == 0
    assert "note: recorded with cpu, jaxlib 0.0.1, compiled with cpu, jaxlib" in capsys.readouterr().out
    (folder / "guarded.py").write_text(
        SOURCE.replace('params = place(params, P("data"))', "params = place(params, P())")
    )
    sys.modules.pop("guarded")
    assert guard("check") == 1
    assert "stored replicated" in capsys.readouterr().out
