"""Checkpoints of models of `js.lora` hold factors, optimizer state and checksums of the base, which is given again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.checkpoint.reader import describe
from jaxshard.core.keys import words_of

TX = optax.adam(1e-2)
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)}


def init_fn(key):
    return {"w": jax.random.normal(key, (6, 10)), "norm": jnp.ones(6)}


def loss_fn(params, batch, key):
    return js.Mean(((batch["x"] * params["norm"] @ params["w"]) ** 2).sum(), len(batch["x"]))


def tuned(base="int8"):
    return js.lora(init_fn, loss_fn, rank=2, match=["w"], base=base)


def layouts(base="int8"):
    mesh = js.make_mesh(jax.devices()[:2], data=2)
    return [js.layout(strategy, mesh, tuned(base).init, TX) for strategy in (js.fsdp(min_size=0), js.ddp())]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(a folder with step 1, the run in it, the base that it was trained on)."""
    folder, layout, base = tmp_path_factory.mktemp("lora"), layouts()[0], jax.device_get(init_fn(jax.random.key(7)))
    run = js.init(tuned().init, TX, layout, 0, init_from=base)
    run, _ = js.make_step(tuned().loss, TX, layout, engine=js.explicit())(run, BATCH)
    js.save(folder, run, layout)
    return folder, run, base


def assert_same(a, b):
    a, b = (jax.device_get(jax.tree.map(words_of, tree)) for tree in (a, b))
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_a_run_starts_from_a_base_in_its_dtype_and_draws_the_factors_of_the_key(trained):
    _, _, base = trained
    run = js.init(tuned().init, TX, layouts()[0], 0, init_from=base)
    drawn = tuned().init(jax.random.key(0))["w"]
    w = js.logical(run, layouts()[0]).params["w"]
    np.testing.assert_allclose(w.a, drawn.a, rtol=1e-6)
    assert w.base.dtype == jnp.int8 and not w.b.any()
    # The largest magnitude of a column is 127 of its scale.
    np.testing.assert_allclose(js.merge_lora(w), base["w"], atol=np.abs(base["w"]).max() / 254 * 1.001)
    with pytest.raises(ValueError, match=r"norm: expected float32\[6\], got float16\[6\]"):
        js.init(tuned().init, TX, layouts()[0], 0, init_from=base | {"norm": np.ones(6, np.float16)})


def test_a_checkpoint_holds_the_factors_and_what_is_trained(trained):
    folder, run, _ = trained
    manifest = describe(folder)
    assert {array.path for array in manifest.arrays} == {
        "step", "key", "params/w/a", "params/w/b", "opt_state/0/count",
        *(f"opt_state/0/{moment}/w/{factor}" for moment in ("mu", "nu") for factor in "ab"),
    }  # fmt: skip
    assert {path: text.rsplit(" ", 1)[0] for path, text in manifest.base.items()} == {
        "norm": "float32[6]", "w/base": "int8[6, 10]", "w/scale": "float32[10]",
    }  # fmt: skip
    js.save(folder, run, layouts()[0])  # the same run again is left as it is


def test_it_is_restored_onto_another_layout_with_the_base_given_again(trained):
    folder, run, base = trained
    before = js.logical(run, layouts()[0])
    for layout in layouts():
        restored = js.restore(folder, layout, init_from=base)
        assert_same(before.params, js.logical(restored, layout).params)
        assert_same(before.opt_state, js.logical(restored, layout).opt_state)
    assert_same(js.restore(folder, layouts()[0], init_from=run), run)
    with js.Checkpointer(folder, layouts()[0], every=1, init_from=base) as checkpointer:
        assert_same(checkpointer.restore()[0].params, run.params)


def test_another_base_is_refused_by_name(trained):
    folder, _, base = trained
    other = base | {"norm": base["norm"].copy()}
    other["norm"][4] = np.nextafter(np.float32(1), np.float32(2))
    with pytest.raises(
        ValueError, match=r"another base(.|\n)*norm: float32\[6\] \w+ in init_from, expected float32\[6\]"
    ) as error:
        js.restore(folder, layouts()[0], init_from=other)
    assert "w/base" not in str(error.value)
    with pytest.raises(ValueError, match=r"w/scale: missing in init_from"):
        js.restore(folder, layouts("bf16")[0], init_from=base)
    with pytest.raises(ValueError, match="give it again as init_from="):
        js.restore(folder, layouts()[0])
    plain = js.layout(js.fsdp(min_size=0), js.make_mesh(jax.devices()[:2], data=2), init_fn, TX)
    with pytest.raises(ValueError, match=r"init_from is for models of js\.lora"):
        js.restore(folder, plain, init_from=base)


@pytest.mark.slow
def test_safetensors_hold_the_merged_model_and_load_as_a_base(trained, tmp_path):
    _, run, _ = trained
    layout = layouts()[0]
    file = js.save_safetensors(tmp_path / "merged.safetensors", run, layout)
    plain = js.layout(js.ddp(), js.make_mesh(jax.devices()[:2], data=2), init_fn, TX)
    merged = js.load_safetensors(file, plain)
    logical = js.logical(run, layout).params
    assert_same(merged, js.merge_lora(logical))
    value = loss_fn(merged, BATCH, None).value
    np.testing.assert_allclose(value, tuned().loss(logical, BATCH, None).value, rtol=1e-5)
    again = js.init(tuned().init, TX, layout, 0, init_from=js.load_safetensors(file, layout))
    assert again.params["w"].base.dtype == jnp.int8


def test_the_bytes_of_a_run_hold_all_of_it(trained):
    _, run, _ = trained
    assert_same(js.run_from_bytes(js.run_to_bytes(run, layouts()[0]), layouts()[0])[0], run)
