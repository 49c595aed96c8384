"""Settings of JAX around a run: it gives the same numbers under them, or says what is the matter."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxshard as js
from jaxshard.core.mesh import MeshById
from tests.toys import normal, quick_compile

pytestmark = pytest.mark.fast_cases(1)

TX = optax.sgd(1e-2, momentum=0.9)
BATCH = {
    "x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32),
    "y": np.random.default_rng(1).normal(size=(16, 4)).astype(np.float32),
}
MESH = js.make_mesh(data=8)
AUTO = (AxisType.Auto,) * 2


def init_fn(key):
    return {"up": normal(0, 16, 32) / 4, "down": normal(1, 32, 4) / 4}


def loss_fn(params, batch, key):
    errors = (jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2
    return js.Mean(errors.sum(), errors.size)


def make(engine=None):
    layout = js.layout(js.fsdp(min_size=0), MESH, init_fn, TX)
    return layout, js.make_step(loss_fn, TX, layout, engine=engine or js.explicit())


def train(engine, folder):
    """Every public way from a seed to a number: two steps, an evaluation with a short batch, saving and restoring."""
    layout, step = make(engine)
    run = js.init(init_fn, TX, layout, 0)
    for batch in js.batches([BATCH, BATCH], layout):
        run, metrics = step(run, batch)
    eval_step = js.make_eval_step(lambda params, batch: {"loss": loss_fn(params, batch, None)}, layout)
    results = js.evaluate(eval_step, run, [BATCH, {name: x[:5] for name, x in BATCH.items()}])
    js.save(folder, run, layout)
    saved = js.logical(js.restore(folder, layout), layout)
    weights = js.to_bytes(run, layout)
    assert js.from_bytes(weights, layout)["up"].sharding == run.params["up"].sharding
    return jax.device_get(metrics["loss"]), results["loss"], jax.device_get(saved.params["up"])


SETTINGS = {
    "a mesh of explicit axes": lambda: jax.set_mesh(jax.make_mesh((8,), ("data",))),
    "another mesh": lambda: jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"), axis_types=AUTO)),
    "its own mesh": lambda: jax.set_mesh(MESH),
    "a transfer guard": lambda: jax.transfer_guard("disallow"),
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "strict ranks": lambda: jax.numpy_rank_promotion("raise"),
    "debug_nans": lambda: jax.debug_nans(True),
}


ENGINES = {"explicit": js.explicit(), "auto": js.auto()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return functools.cache(lambda name: train(ENGINES[name], tmp_path_factory.mktemp(name)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_numbers_under_any_setting(setting, engine, expected, tmp_path):
    """Bit for bit."""
    with quick_compile():
        wanted = expected(engine)
        with SETTINGS[setting]():
            got = train(ENGINES[engine], tmp_path)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_callers_mesh_is_back_afterwards():
    layout, _ = make()
    other = jax.make_mesh((2, 4), ("a", "b"), axis_types=AUTO)
    with jax.set_mesh(other):
        with quick_compile():
            js.init(init_fn, TX, layout, 0)
        assert jax.sharding.get_mesh() == other
    assert jax.sharding.get_abstract_mesh().empty


def test_without_compilation_it_says_so():
    layout, step = make()
    with quick_compile():
        run = js.init(init_fn, TX, layout, 0)
    with jax.disable_jit():
        for call in (
            lambda: js.init(init_fn, TX, layout, 0),
            lambda: step(run, BATCH),
            lambda: js.logical(run, layout),
        ):
            with pytest.raises(
                RuntimeError, match=r"jax.disable_jit is on, but layouts exist in compiled programs only"
            ):
                call()
        assert "up" in str(js.layout(js.fsdp(), MESH, init_fn, TX))  # shapes need no program


def test_debug_nans_says_where_to_look():
    layout = js.layout(js.fsdp(min_size=0), MESH, init_fn, TX)
    step = js.make_step(lambda params, batch, key: js.Mean(jnp.log(-jnp.abs(params["up"])).sum(), 1.0), TX, layout)
    with quick_compile(), jax.debug_nans(True):
        run = js.init(init_fn, TX, layout, 0)
        with pytest.raises(FloatingPointError, match=r"a step made nan, and jax.debug_nans .* metrics\['bad'\]"):
            step(run, BATCH)


BAD = {"x": BATCH["x"], "name": "float32", "words": ["a", "b"], "labels": np.array(["a"] * 16), "more": {"fn": len}}


@pytest.mark.parametrize(
    "call",
    [
        lambda layout, step, run: step(run, BAD),
        lambda layout, step, run: step.lower(BAD),
        lambda layout, step, run: js.audit(step, BAD),
        lambda layout, step, run: js.parity(init_fn, loss_fn, TX, js.fsdp(), MESH, BAD),
        lambda layout, step, run: js.make_eval_step(lambda params, batch: {}, layout)(run, BAD),
        lambda layout, step, run: next(iter(js.batches([BAD], layout))),
        lambda layout, step, run: js.init(init_fn, TX, layout, 0, init_from=BAD),
    ],
)
def test_strings_among_the_leaves_are_named(call):
    layout, step = make()
    with quick_compile():
        run = js.init(init_fn, TX, layout, 0)
    with pytest.raises(TypeError, match=r"must be a tree of arrays and numbers") as error:
        call(layout, step, run)
    text = str(error.value)
    assert "- name: str 'float32'" in text and "- words/*: str 'a' and 1 more" in text
    assert "- labels: ndarray" in text and "- more/fn: builtin_function_or_method" in text and "- x" not in text


def test_strings_in_the_optimizer_state_are_named():
    tx = optax.GradientTransformation(lambda params: {"kind": "sgd"}, lambda grads, state, params=None: (grads, state))
    with pytest.raises(TypeError, match=r"tx.init must return a tree of arrays; these leaves are none:\n  - kind: str"):
        js.layout(js.fsdp(), MESH, init_fn, tx)


# Copies of layouts.


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy])
def test_a_copied_layout_is_the_same(copied):
    rows = np.array(jax.devices())[::-1].reshape(4, 2)
    mesh = jax.sharding.Mesh(rows, ("data", "tensor"), axis_types=AUTO)
    strategy = js.compose(js.fsdp(min_size=0), js.tensor([("*up", (None, "mlp")), *js.RULES]))
    layout = js.layout(strategy, mesh, init_fn, TX)
    again = copied(layout)
    assert again == layout and again.mesh == mesh and str(again) == str(layout)
    with quick_compile():
        step = js.make_step(loss_fn, TX, again)
        run, _ = step(js.init(init_fn, TX, layout, 0), BATCH)
    assert run.params["up"].sharding.mesh.devices.tolist() == rows.tolist()


def test_a_layout_of_devices_that_are_not_here_is_refused():
    with pytest.raises(ValueError, match=r"of 16 cpu devices, and here are 8 cpu ones, without those of ids 8, 9"):
        MeshById("cpu", list(range(16)), ("data",)).find()
    with pytest.raises(ValueError, match=r"of a mesh of 8 tpu devices, and here are 8 cpu ones; load it where"):
        MeshById("tpu", list(range(8)), ("data",)).find()
