"""gather_dtype="quant": weights that a model rounds are gathered in their 8 bits, and rounded to the same numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxshard as js
from jaxshard.engines.rounded_weights import Rounded, gather_rounded

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


@pytest.mark.parametrize(("quant", "share"), [("int8", 0.12), ("fp8", 0.0)])
def test_in_bf16_a_gathered_weight_moves_some_int8_numbers_by_two_at_most_and_no_fp8(quant, share):
    rule = js.models.quant_rules(quant)[0]
    how = {"qtype": rule.weight_qtype, "calibration_method": rule.weight_calibration_method, "channelwise_axes": (1,)}
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(512, 64)), jnp.float32)
    once = qwix.quantize(weight, **how)
    sent, cast = (
        np.asarray(qwix.quantize(x.astype(jnp.bfloat16), **how).qvalue, np.float32)
        for x in (qwix.dequantize(once), weight)
    )
    exact = np.asarray(once.qvalue, np.float32)
    assert (sent != exact).mean() <= share < (cast != exact).mean()
    assert np.abs(sent - exact).max() <= 2


@pytest.mark.parametrize("wanted", [None, jnp.float32])
def test_a_bf16_weight_is_gathered_in_the_dtype_of_computation_or_its_own(wanted):
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), lambda key: {"w": jnp.zeros((8, 4))}, TX)
    stored = Rounded(jnp.ones((8, 4), jnp.int8), jnp.ones((1, 4)), jnp.dtype(jnp.bfloat16))
    gathered = jax.shard_map(
        lambda x: gather_rounded(layout, layout.params["w"], x, wanted),
        mesh=layout.mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    assert jax.eval_shape(gathered, stored).dtype == (wanted or jnp.bfloat16)


class InInt4(js.Stacked):
    @property
    def rounded_weights(self):
        return {"blocks/w": ("int4", (1,))}


def test_a_dtype_without_a_format_is_refused_by_path():
    def head(params, x, batch):
        return js.Mean(x.sum(), x.size)

    def init(key):
        return {"embed": {"w": jnp.zeros((32, 32))}, "block": {"w": jnp.zeros((32, 32))}, "head": {}}

    model = InInt4(lambda params, batch, key: batch["tokens"] @ params["w"], lambda w, x, key: x, head, 2, init)
    _, step = step_of(model, "fsdp", js.explicit(gather_dtype="quant"))
    with pytest.raises(ValueError, match=r"the model rounds blocks/w to int4, .* gathered in int8, float8"):
        step.trace({"tokens": np.zeros((8, 32), np.float32)})


def test_a_model_that_rounds_nothing_is_refused():
    _, step = step_of(model_of(None), "fsdp", js.explicit(gather_dtype="quant"))
    with pytest.raises(ValueError, match=r"gather_dtype='quant' .* this model rounds none .* quant='int8'"):
        step.trace(BATCH)


def test_a_rule_that_rounds_otherwise_is_refused_by_path():
    model = model_of([qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, module_path="qkv")])
    _, step = step_of(model, "fsdp", js.explicit(gather_dtype="quant"))
    with pytest.raises(ValueError, match=r"gather_dtype='quant': the rule for blocks/qkv/kernel .*'absmax'"):
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
