"""What a run exports is the model in its order, whatever layout: other programs read it, any layout loads it."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

import jaxshard as js
from jaxshard.checkpoint.safetensors import header
from tests.checkpoint import small
from tests.checkpoint.runs import DEPTH, made
from tests.engines.pipeline.pipes import small_gpt
from tests.toys import model_order, start_of

pytestmark = pytest.mark.fast_cases(3)

NAMES = ["ddp", "fsdp", "tensor", "pipeline", "three"]
PRODUCT = [(name, devices) for name in NAMES for devices in (1, 2, 4, 8)]


def by_name(tree):
    """NumPy arrays of a nested dictionary under dotted names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in leaves}


def expected():
    return by_name(start_of(small_gpt(DEPTH).init_fn))


def assert_equal(got, want):
    assert sorted(got) == sorted(want)
    for name in want:
        assert got[name].shape == want[name].shape and got[name].dtype == want[name].dtype, name
        assert got[name].tobytes() == want[name].tobytes(), name


def round_trip(name, devices, target, folder, **options):
    """Out of one layout, through the library, onto another layout and into a run there."""
    source, there = made(name, devices), made(*target)
    path = js.save_safetensors(folder / "model.safetensors", source.run(), source.layout, **options)
    files = sorted(folder.glob("*.safetensors"))
    tensors = [safetensors.numpy.load_file(file) for file in files]
    assert sum(map(len, tensors)) == len(expected())
    assert_equal({key: x for file in tensors for key, x in file.items()}, expected())
    loaded = js.load_safetensors(path, there.layout)
    run = js.init(there.toy.init_fn, optax.sgd(1.0), layout_of(there), 0, init_from=loaded)
    assert_equal(by_name(model_order(there.layout.params, run.params)), expected())
    for x, placement in zip(jax.tree.leaves(run.params), jax.tree.leaves(there.layout.params), strict=True):
        assert x.sharding.is_equivalent_to(placement.sharding(there.layout.mesh), x.ndim)
    return files


def layout_of(there):
    """The layout with an optimizer whose state takes no time to make."""
    return js.layout(there.layout.strategy, there.layout.mesh, there.toy.init_fn, optax.sgd(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("place", PRODUCT, ids=str)
def test_every_layout_on_every_number_of_devices(place, tmp_path):
    """Each writes the very bytes that the first one writes, and loads them: so each loads what any other wrote."""
    first = made(*PRODUCT[0])
    path = js.save_safetensors(tmp_path / "first.safetensors", first.run(), first.layout)
    (tmp_path / "mine").mkdir()
    round_trip(*place, place, tmp_path / "mine")
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == path.read_bytes()
    (tmp_path / "many").mkdir()
    round_trip(*place, place, tmp_path / "many", max_bytes=20_000)


@pytest.mark.slow
def test_bytes_are_those_of_the_file(tmp_path):
    here = made("three")
    raw = js.to_bytes(here.run(), here.layout)
    assert js.save_safetensors(tmp_path / "a.safetensors", here.run(), here.layout).read_bytes() == raw
    assert raw == js.to_bytes(here.run().params, here.layout)
    assert_equal(safetensors.numpy.load(raw), expected())
    assert_equal(by_name(js.from_bytes(raw, made("fsdp").layout)), expected())


def test_state_and_keys_go_with_the_parameters(tmp_path):
    run, layout = small.at(3), small.layout()
    model = js.from_bytes(js.to_bytes(run, layout), small.layout(4))
    again = js.init(small.init_fn, small.TX, small.layout(4), 1, init_from=model)
    for name, x in run.params.items():
        assert np.asarray(again.params[name]).tobytes() == np.asarray(x).tobytes()
    assert np.asarray(again.state["mean"]).tolist() == [0, 1, 2, 3, 4] and not again.state["seen"]
    assert again.state["key"].dtype == run.state["key"].dtype
    keys = [jax.random.key_data(one.state["key"]).tolist() for one in (again, run)]
    assert keys[0] == keys[1]
    names = [name for name, _ in deserialize(js.to_bytes(run, layout))]
    state = ["state.key", "state.mean", "state.seen"]
    assert sorted(names) == ["params.", "params.a/b", "params.none", "params.w", *state]


DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint16", "int32", "bool"]
LEAVES = st.tuples(
    st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1)
)
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="."), min_size=1, max_size=5)
TREES = st.recursive(
    st.dictionaries(WORDS, LEAVES, min_size=1, max_size=3),
    lambda inner: st.dictionaries(WORDS, inner | st.lists(inner, min_size=1, max_size=2), min_size=1, max_size=2),
    max_leaves=4,
)


def value_of(leaf):
    shape, dtype, seed = leaf
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, np.uint8)
    return raw.view(dtype).reshape(shape)


def check_any_tree(spec, devices):
    """Frozen arrays of any bits beside one that is trained."""
    tree = jax.tree.map(value_of, {"any": spec}, is_leaf=lambda x: isinstance(x, tuple)) | {"w": np.ones(8, np.float32)}

    def init_fn(key):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

    mesh = js.make_mesh(jax.devices()[:devices], data=devices)
    layout = js.layout(js.fsdp("data", min_size=0), mesh, init_fn, optax.sgd(1.0), trainable=lambda path: path == "w")
    run = js.init(init_fn, optax.sgd(1.0), layout, 0, init_from=tree)
    raw = js.to_bytes(run, layout)
    want = by_name(tree)
    theirs = {name: (fields["dtype"], tuple(fields["shape"]), fields["data"]) for name, fields in deserialize(raw)}
    dtypes = {ours: name for name, ours in header.DTYPES.items()}
    assert {name: (dtypes[str(x.dtype)], x.shape, x.tobytes()) for name, x in want.items()} == {
        name: (dtype, shape, bytes(data)) for name, (dtype, shape, data) in theirs.items()
    }
    back = js.from_bytes(raw, layout)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert_equal(by_name(back), want)


@pytest.mark.slow
@given(spec=TREES, devices=st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=40, deadline=None)
def test_many_trees_of_any_dtypes(spec, devices):
    check_any_tree(spec, devices)


def simple(tree, **options):
    return small.placed(lambda key: tree, **options)


def test_what_no_file_can_hold_is_refused_by_name(tmp_path):
    ones = jnp.ones(2)
    tree = {"a": {"b": ones}, "a.b": ones, "w": ones, "four": jnp.zeros(2, ml_dtypes.int4), "__metadata__": ones}
    run, layout = simple(tree, trainable=lambda path: path == "w")
    with pytest.raises(ValueError) as caught:
        js.save_safetensors(tmp_path / "x.safetensors", run, layout)
    assert str(caught.value).splitlines()[1:] == [
        "  - __metadata__: '__metadata__' can't be the name of a tensor; rename it",
        "  - a/b: the name 'a.b' is that of another one too; rename one of them",
        "  - a.b: the name 'a.b' is that of another one too; rename one of them",
        "  - four: safetensors has no int4; keep it in another dtype",
    ]
    with pytest.raises(ValueError, match=r"ends with \.safetensors"):
        js.save_safetensors(tmp_path / "x", *simple({"w": ones}))
    assert list(tmp_path.iterdir()) == []


def test_another_run_and_another_place(tmp_path):
    run, layout = simple({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"w: expected float32\[2\], got float32\[3\]"):
        js.to_bytes({"w": jnp.ones(3)}, layout)
    with pytest.raises(ValueError, match="w: ndarray, expected NamedSharding"):
        js.to_bytes({"w": np.ones(2, np.float32)}, layout)
    path = js.save_safetensors(tmp_path / "new" / "x.safetensors", run, layout)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"x.safetensors is there already; delete it, .* or give overwrite=True"):
        js.save_safetensors(path, run, layout)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1
    for name in ("y.safetensors", "y.safetensors.index.json", "none/y.safetensors"):
        with pytest.raises(FileNotFoundError, match=rf"{name}: no model is here"):
            js.load_safetensors(tmp_path / name, layout)


FORMS = {"one": 1 << 20, "two": 16, "three": 8}


@pytest.mark.parametrize("after", FORMS)
@pytest.mark.parametrize("before", FORMS)
def test_a_model_replaces_another_one_whatever_files_they_have(before, after, tmp_path):
    old, new = ({"u": jnp.full(2, x), "v": jnp.full(2, 2 * x), "w": jnp.full(2, 3 * x)} for x in (1.0, 5.0))
    path = js.save_safetensors(tmp_path / "x.safetensors", *simple(old), max_bytes=FORMS[before])
    (tmp_path / "x-other.safetensors").write_bytes(b"not of the model")
    run, layout = simple(new)
    js.save_safetensors(path, run, layout, max_bytes=FORMS[after], overwrite=True)
    assert js.load_safetensors(path, layout)["w"].tolist() == [15, 15]
    count = {"one": 1, "two": 3, "three": 4}[after]
    assert len(list(tmp_path.iterdir())) == count + 1 and (tmp_path / "x-other.safetensors").exists()


def test_every_tensor_that_differs_is_named(tmp_path):
    tree = {"w": jnp.ones((2, 3)), "half": jnp.ones(4, jnp.bfloat16), "old": jnp.ones(1), "same": jnp.ones(1)}
    raw = js.to_bytes(*simple(tree))
    _, other = simple({"w": jnp.ones((3, 2)), "half": jnp.ones(4), "new": jnp.ones(1), "same": jnp.ones(1)})
    with pytest.raises(ValueError, match="nothing is cast or left out") as caught:
        js.from_bytes(raw, other)
    assert str(caught.value).splitlines()[1:] == [
        "  - new: missing, expected float32[1]",
        "  - old: float32[1], not in the layout",
        "  - half: bfloat16[4], expected float32[4]",
        "  - w: float32[2, 3], expected float32[3, 2]",
    ]


def test_damage_is_found_before_anything_is_loaded(tmp_path):
    run, layout = simple({"w": jnp.arange(6.0), "v": jnp.ones(2)})
    path = js.save_safetensors(tmp_path / "x.safetensors", run, layout)
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"x.safetensors is damaged\n.*x.safetensors: tensor 'w': its bytes are not"):
        js.load_safetensors(path, layout)
    assert np.asarray(js.load_safetensors(path, layout, verify=False)["v"]).tolist() == [1, 1]
    path.write_bytes(raw[:-1])
    with pytest.raises(ValueError, match=r"x.safetensors: \d+ bytes, and its header speaks of \d+: it was cut off"):
        js.load_safetensors(path, layout)


def test_a_set_of_files_is_complete_and_of_its_index(tmp_path):
    run, layout = simple({"v": jnp.ones(2), "w": jnp.arange(6.0)})
    path = js.save_safetensors(tmp_path / "x.safetensors", run, layout, max_bytes=10)
    index = tmp_path / "x.safetensors.index.json"
    first, second = sorted(tmp_path.glob("x-*"))
    good, weights = first.read_bytes(), json.loads(index.read_text())

    def refused(message):
        with pytest.raises(ValueError, match=message):
            js.load_safetensors(path, layout)

    first.unlink()
    refused(f"{first.name}: No such file")
    first.write_bytes(second.read_bytes())
    refused(rf"(?s){first.name}: tensor 'w' is not of it by the index.*{first.name}: tensor 'v' is missing")
    first.write_bytes(b"")
    refused(f"{first.name}: 0 bytes are no safetensors file")
    first.write_bytes(good)
    for name in ("../x.safetensors", "/etc/passwd", "x", 3, "a/b.safetensors"):
        index.write_text(json.dumps(weights | {"weight_map": {"v": name, "w": second.name}}))
        refused("index.json: it has no weight_map of tensors to files beside it")
    for text in ("[" * 100_000, "[]", "{}", "\x00", '{"weight_map": []}'):
        index.write_text(text)
        refused("index.json: ")
    with pytest.raises(FileExistsError, match="is there already"):
        js.save_safetensors(path, run, layout)
