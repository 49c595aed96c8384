"""`quant` of ready-made models: losses of one device on every mesh, which products are in 8 bits, untouched trees."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js

pytest.importorskip("qwix")

pytestmark = [
    pytest.mark.usefixtures("compiled_quickly"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # qwix 0.1.8 calls what newer Flax deprecates
]

TX = optax.adam(1e-2)
BATCH = {"tokens": np.random.default_rng(0).integers(0, 64, (8, 9)).astype(np.int32)}

_SMALL = {"vocab": 64, "width": 32, "depth": 2, "heads": 2, "seq": 8}
MODELS = {
    "gpt": partial(js.models.gpt, **_SMALL),
    "llama": partial(js.models.llama, **_SMALL, kv_heads=2, hidden=64),
    "moe": partial(js.models.moe, **_SMALL, kv_heads=2, hidden=32, experts=4, k=2, shared=1),
}
MESHES = {
    "one": (js.fsdp, {"data": 1}),
    "fsdp": (js.fsdp, {"data": 8}),
    "tensor": (lambda: js.compose(js.fsdp("data"), js.tensor()), {"data": 4, "tensor": 2}),
    "expert": (lambda: js.compose(js.fsdp("data"), js.expert()), {"data": 2, "expert": 4}),
}


def made(model, where, engine):
    strategy, axes = MESHES[where]
    count = int(np.prod(list(axes.values())))
    layout = js.layout(strategy(), js.make_mesh(jax.devices()[:count], **axes), model.init, TX)
    return layout, js.make_step(model.loss, TX, layout, engine=engine)


def losses_of(model, where, engine, steps=2):
    layout, step = made(model, where, engine)
    run, losses = js.init(model.init, TX, layout, 0), []
    for _ in range(steps):
        run, metrics = step(run, BATCH)
        losses.append(float(metrics["loss"]))
    return losses


@cache
def one_device(name, quant):
    return losses_of(MODELS[name](quant=quant), "one", js.auto())


def products_of(closed) -> dict[str, int]:
    """Count a jaxpr's products, and those of jaxprs inside it, by the dtype of the left operand."""
    counts: dict[str, int] = {}
    for eqn in closed.eqns:
        if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
            name = eqn.invars[0].aval.dtype.name
            counts[name] = counts.get(name, 0) + 1
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(param, "jaxpr", param)
            for name, count in products_of(inner).items() if hasattr(inner, "eqns") else ():
                counts[name] = counts.get(name, 0) + count
    return counts


def forward_products(model):
    params = jax.eval_shape(model.init, jax.random.key(0))
    # As many tokens as features: x [32, 32] has the shape of a square weight, which qwix might take it for.
    batch = {"tokens": BATCH["tokens"][:4]}
    closed = jax.make_jaxpr(lambda params: model.loss(params, batch, jax.random.key(0)))(params)
    return products_of(closed.jaxpr)


# gpt: qkv, attn_out, mlp_in, mlp_out. llama: q, k, v, o and three of the MLP; moe: three of the experts besides.
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "quant", "weights"), [("gpt", "int8", 4), ("gpt", "fp8", 4), ("llama", "int8", 7), ("moe", "fp8", 10)]
)
def test_the_products_of_the_blocks_weights_are_in_8_bits_and_no_others(name, quant, weights):
    plain = forward_products(MODELS[name]())["float32"]
    dtype = {"int8": "int8", "fp8": "float8_e4m3fn"}[quant]
    assert forward_products(MODELS[name](quant=quant)) == {dtype: weights, "float32": plain - weights}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_trees_are_those_of_the_model_without_quant(name):
    plain, rounded = (jax.eval_shape(MODELS[name](quant=quant).init, jax.random.key(0)) for quant in (None, "int8"))
    assert plain == rounded


CELLS = [
    *(("gpt", quant, where) for quant in ("int8", "fp8") for where in ("fsdp", "tensor")),
    *(("llama", quant, where) for quant in ("int8", "fp8") for where in ("fsdp", "tensor")),
    *(("moe", quant, where) for quant in ("int8", "fp8") for where in ("fsdp", "expert")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quant", "where"), CELLS)
def test_losses_are_those_of_one_device(name, quant, where):
    one = one_device(name, quant)
    assert abs(one[-1] - one_device(name, None)[-1]) > 1e-5  # something was rounded
    for engine in (js.auto(), js.explicit(remat="nothing")):
        np.testing.assert_allclose(losses_of(MODELS[name](quant=quant), where, engine), one, rtol=0, atol=1e-3)


def test_a_quant_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"quant must be 'int8' or 'fp8', or a list of qwix\.QtRule, got 'int4'"):
        js.models.make("gpt-1m", quant="int4")


def test_rules_that_experts_do_not_follow_are_refused_by_name():
    import qwix

    rule = qwix.QtRule(module_path="experts/.*", weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8)
    with pytest.raises(ValueError, match=r"quant: the rule for experts/gate_proj has \['bwd_qtype'\]"):
        js.models.make("moe-1m", quant=[rule])


METHOD = js.models.quant_rules("int8")[0].weight_calibration_method


def rounded_by(name="gpt", **how):
    import qwix

    return MODELS[name](quant=[qwix.QtRule(**how), *js.models.quant_rules("int8", module_path=".*out")]).rounded_weights


def test_a_rule_for_other_operations_rounds_no_layer():
    assert set(rounded_by(op_names=("ragged_dot",), weight_qtype=jnp.int8)) == {
        f"blocks/{name}/kernel" for name in ("attn_out", "mlp_out")
    }
    named = {"op_names": ("dot_general",), "weight_qtype": jnp.int8, "weight_calibration_method": METHOD}
    assert len(rounded_by(**named)) == 4


def test_the_rounded_weights_of_a_model_that_was_traced_before_are_the_same():
    model = MODELS["gpt"](quant="int8")
    jax.eval_shape(model.init_parts, jax.random.key(0))
    assert len(model.rounded_weights) == 4
    assert model.rounded_weights == model.rounded_weights


OTHERS = {
    "weight_calibration_method='absmax'": {"weight_qtype": jnp.int8},
    "weight_qtype=int4": {"weight_qtype": jnp.int4},
    "tile_size=8": {"weight_qtype": jnp.int8, "weight_calibration_method": METHOD, "tile_size": 8},
    "weight_calibration_method='absmax,0.5'": {"weight_qtype": "int8", "weight_calibration_method": "absmax,0.5"},
    "weight_qtype=nf4": {"weight_qtype": "nf4"},
    "weight_qtype=float8_e5m2": {"weight_qtype": jnp.float8_e5m2},
    "disable_channelwise_axes=True": {"weight_qtype": jnp.float8_e4m3fn, "disable_channelwise_axes": True},
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("what", OTHERS)
def test_a_weight_that_a_rule_rounds_otherwise_is_not_gathered_in_8_bits(what):
    with pytest.raises(ValueError, match=rf"rule for blocks/qkv/kernel has .*{what}.* js\.models\.quant_rules"):
        rounded_by(module_path="qkv", **OTHERS[what])


def test_experts_by_another_method_are_not_gathered_in_8_bits():
    with pytest.raises(ValueError, match=r"the rule for blocks/experts/\w+ has .*method='absmax'; .*quant_rules"):
        rounded_by("moe", module_path="experts/.*", weight_qtype=jnp.int8, act_qtype=jnp.int8)


@pytest.mark.slow
def test_experts_whose_hidden_units_are_split_are_refused():
    model = MODELS["moe"](quant="int8")
    _, step = made(model, "tensor", js.explicit())
    with pytest.raises(ValueError, match=r"moe: the products of experts .* axes \['tensor'\] split the hidden units"):
        step.trace(BATCH)
