"""gather_dtype="quant": weights that a model rounds are gathered in their 8 bits, and rounded to the same numbers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

qwix = pytest.importorskip("qwix")

pytestmark = [
    pytest.mark.usefixtures("compiled_quickly"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # qwix 0.1.8 calls what newer Flax deprecates
]

TX = optax.adam(1e-2)
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (8, 9)).astype(np.int32)}
MESHES = {
    "fsdp": (js.fsdp(min_size=0), {"data": 8}),
    "tensor": (js.compose(js.fsdp("data", min_size=0), js.tensor()), {"data": 4, "tensor": 2}),
    "expert": (js.compose(js.fsdp("data", min_size=0), js.expert()), {"data": 2, "expert": 4}),
}


def model_of(quant, name="gpt"):
    sizes = {"vocab": 64, "width": 32, "depth": 2, "heads": 2, "seq": 8, "quant": quant}
    if name == "moe":
        return js.models.moe(**sizes, kv_heads=2, hidden=32, experts=4, k=2)
    return js.models.gpt(**sizes)


def step_of(model, where, engine):
    strategy, axes = MESHES[where]
    layout = js.layout(strategy, js.make_mesh(**axes), model.init, TX)
    return layout, js.make_step(model.loss, TX, layout, engine=engine)


def losses_of(model, layout, step):
    run, losses = js.init(model.init, TX, layout, 0), []
    for _ in range(2):
        run, metrics = step(run, BATCH)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize(("quant", "largest"), [("int8", 127), ("fp8", 448)])
def test_a_gathered_weight_is_rounded_to_the_same_numbers_again(quant, largest):
    rule = js.models.quant_rules(quant)[0]
    how = {"qtype": rule.weight_qtype, "calibration_method": rule.weight_calibration_method, "channelwise_axes": (1,)}
    once = qwix.quantize(jnp.asarray(np.random.default_rng(0).normal(size=(512, 64)), jnp.float32), **how)
    assert (np.abs(once.qvalue.astype(jnp.float32)).max(0) == largest).all()
    again = qwix.quantize(qwix.dequantize(once), **how)
    np.testing.assert_array_equal(again.qvalue.astype(jnp.float32), once.qvalue.astype(jnp.float32))
    np.testing.assert_allclose(again.scale, once.scale, rtol=1e-6)


def test_a_model_that_rounds_nothing_is_refused():
    _, step = step_of(model_of(None), "fsdp", js.explicit(gather_dtype="quant"))
    with pytest.raises(ValueError, match=r"gather_dtype='quant' .* this model rounds none .* quant='int8'"):
        step.trace(BATCH)


def test_an_engine_that_does_not_round_once_a_step_is_refused():
    with pytest.raises(ValueError, match=r"gather_dtype='quant' rounds weights once a step, which js.pipelined"):
        js.pipelined(microbatches=2, gather_dtype="quant")


CELLS = [("int8", "gpt", "fsdp"), ("fp8", "gpt", "tensor"), ("int8", "moe", "expert")]


@pytest.mark.slow
@pytest.mark.parametrize(("quant", "name", "where"), CELLS)
def test_weights_are_gathered_in_8_bits_with_the_losses_of_weights_gathered_in_f32(quant, name, where):
    gathered = {}
    for sent in ("quant", None):
        model = model_of(quant, name)
        layout, step = step_of(model, where, js.explicit(gather_dtype=sent, remat="nothing", microbatches=1))
        audit = js.audit(step, BATCH)
        assert audit.ok, str(audit)
        found = [one for one in js.plan.arrays_only(audit.found) if one.kind == "all-gather"]
        gathered[sent] = sum(one.bytes for one in found), losses_of(model, layout, step)
    (ours, losses), (plain, expected) = gathered["quant"], gathered[None]
    np.testing.assert_allclose(losses[0], expected[0], rtol=0, atol=1e-5)  # the same rounded weights
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-3)  # gradients at rounded weights
    assert ours < 0.5 * plain, (ours, plain)
