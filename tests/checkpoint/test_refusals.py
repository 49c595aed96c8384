"""What can't be saved or restored is refused by name, with both numbers."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.checkpoint.manifest import MANIFEST
from jaxshard.checkpoint.reader import describe
from tests.checkpoint.runs import assert_same
from tests.checkpoint.small import TX, at, init_fn, layout, placed


def changed(key):
    """`init_fn` with an array less, an array more, another shape, another dtype."""
    model = init_fn(key)
    params = model.params | {
        "w": jnp.zeros((48, 25)),
        "a/b": model.params["a/b"].astype(jnp.bfloat16),
        "new": jnp.ones(2),
    }
    del params["none"]
    return js.Model(params, model.state | {"seen": jnp.zeros((), jnp.int32)})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    js.save(root, at(7), layout())
    return root


def test_every_array_that_differs_is_named_and_nothing_is_cast(root):
    with pytest.raises(ValueError) as caught:
        js.restore(root, placed(changed)[1])
    lines = str(caught.value).splitlines()
    assert "nothing is cast or left out" in lines[0] and str(root / "7") in lines[0]
    assert {line.removeprefix("  - ") for line in lines[1:] if "opt_state" not in line} == {
        "params/new: missing in the checkpoint, expected float32[2]",
        "params/none: float32[0, 4] in the checkpoint, not in the layout",
        "params/w: float32[48, 24] in the checkpoint, expected float32[48, 25]",
        "params/a%2Fb: float32[64, 48] in the checkpoint, expected bfloat16[64, 48]",
        "state/seen: bool[] in the checkpoint, expected int32[]",
    }
    assert sum("opt_state/0/" in line and line.endswith("not in the layout") for line in lines) == 9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "there is no such folder"),
        ("empty", "is not a folder of checkpoints"),
        ("root/7", r"is the folder of one step; give .*root and step=7"),
    ],
)
def test_folders_that_are_no_checkpoints(name, message, root, tmp_path):
    (tmp_path / "empty" / "images").mkdir(parents=True)
    (tmp_path / "root").symlink_to(root)
    for refuse in (lambda path: js.restore(path, layout()), describe):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            refuse(tmp_path / name)
    assert js.latest_step(tmp_path / "none") is js.latest_step(tmp_path / "empty") is None


def test_steps_that_do_not_exist(root, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no step 8; complete steps: 7"):
        js.restore(root, layout(), step=8)
    js.save(tmp_path, at(1), layout())
    (js.save(tmp_path, at(2), layout()) / MANIFEST).unlink()
    assert js.latest_step(tmp_path) == 1 and int(js.restore(tmp_path, layout()).step) == 1
    with pytest.raises(
        ValueError, match=re.escape("2/manifest.json is missing, so this step was not completely saved")
    ):
        js.restore(tmp_path, layout(), step=2)
    (tmp_path / "1" / MANIFEST).unlink()
    with pytest.raises(ValueError, match="not completely saved; complete steps: none"):
        js.restore(tmp_path, layout())


def test_a_step_is_saved_once_unless_it_is_damaged(tmp_path):
    folder = js.save(tmp_path, at(1), layout())
    before = (folder / MANIFEST).read_bytes()
    assert js.save(tmp_path, at(1), layout()) == folder and (folder / MANIFEST).read_bytes() == before
    other = at(1)._replace(key=js.init(init_fn, TX, layout(), 5).key)
    with pytest.raises(ValueError, match="step 1 of another run is there; save into another folder, or delete it"):
        js.save(tmp_path, other, layout())
    run, thin = placed(init_fn)
    with pytest.raises(ValueError, match="step 1 of another run is there"):
        js.save(tmp_path, run._replace(step=run.step + 1), thin)
    assert (folder / MANIFEST).read_bytes() == before
    (folder / "arrays" / "_CHECKPOINT_METADATA").unlink()
    assert js.latest_step(tmp_path, intact=True) is None
    js.save(tmp_path, at(1), layout())
    assert js.latest_step(tmp_path, intact=True) == 1


def test_optimizer_states_of_any_structure(tmp_path):
    mask = {"a/b": True, "w": False, "": True, "none": True}
    tx = optax.chain(optax.masked(optax.adam(0.1), mask), optax.inject_hyperparams(optax.sgd)(0.1), optax.ema(0.9))
    run, made = placed(init_fn, tx, js.zero1("data", min_size=0), trainable=lambda path: path != "none")
    js.save(tmp_path, run, made)
    assert_same(js.restore(tmp_path, made), run)


def test_data_comes_back_as_it_was_or_is_refused(tmp_path):
    js.save(tmp_path, at(1), layout(), data={"epoch": 2, "files": ["a", "b"], "rate": 0.1})
    assert describe(tmp_path).data == {"epoch": 2, "files": ["a", "b"], "rate": 0.1}
    for wrong in ((1, 2), {1: 2}):
        with pytest.raises(ValueError, match="does not come back from JSON"):
            js.save(tmp_path, at(2), layout(), data=wrong)
    assert js.latest_step(tmp_path) == 1
    json.dumps(describe(tmp_path).made)


def test_a_run_of_another_layout_and_dtypes_that_no_file_holds(tmp_path):
    with pytest.raises(ValueError, match="have other shardings than the layout"):
        js.save(tmp_path, at(1), layout(4))

    def init(key):
        return js.Model({"w": jnp.ones(4)}, {"bits": jnp.zeros(8, jnp.uint4)})

    run, odd = placed(init)
    with pytest.raises(ValueError, match="state/bits: uint4"):
        js.save(tmp_path, run, odd)
    assert not list(tmp_path.iterdir())


def test_dtypes_survive(tmp_path):
    names = ("bfloat16", "float16", "float8_e4m3fn", "int4", "int8", "uint8", "uint32", "bool", "complex64", "int2")

    def init(key):
        state = {name: jnp.asarray(np.arange(6) % 2, name) for name in names}
        odd = jnp.array([-0.0, np.nan, np.inf, 1e-45])
        return js.Model({"w": odd}, state | {"key": jax.random.split(jax.random.key(3, impl="rbg"), 3)})

    run, made = placed(init)
    js.save(tmp_path, run, made)
    back = js.restore(tmp_path, made)
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, run)
    assert jax.random.key_data(back.state.pop("key")).tolist() == jax.random.key_data(run.state.pop("key")).tolist()
    for a, b in zip(jax.tree.leaves((back.params, back.state)), jax.tree.leaves((run.params, run.state)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_every_bit_of_a_padded_array_survives(dtype, tmp_path):
    """NaN with any payload among them, which passes through no float on the way."""
    size = 35 * np.dtype(dtype).itemsize
    value = np.random.default_rng(0).integers(0, 256, size, np.uint8).view(dtype).reshape(5, 7)
    tree = {"any": value, "w": np.ones(8, np.float32)}
    fsdp, zeros = js.fsdp("data", min_size=0), jax.tree.map(jnp.zeros_like, tree)
    run, made = placed(lambda key: zeros, None, fsdp, given=tree, trainable=lambda path: path == "w")
    assert made.params["any"].view.is_padded
    js.save(tmp_path, run, made)
    back = js.restore(tmp_path, made).params["any"]
    assert np.asarray(back)[:5, :7].tobytes() == value.tobytes() == np.asarray(run.params["any"])[:5, :7].tobytes()
    assert np.asarray(js.from_bytes(js.to_bytes(run, made), made)["any"]).tobytes() == value.tobytes()


def test_folders_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    js.save("run", at(3), layout())
    assert js.latest_step("run") == int(js.restore("run", layout()).step) == 3 and describe("run").step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
