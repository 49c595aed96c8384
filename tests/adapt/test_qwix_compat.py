"""Modules of your own, quantized by qwix: losses and scales on every mesh are those of one device, or it is refused."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxshard as js

qwix = pytest.importorskip("qwix")
from qwix._src.core import qarray  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("compiled_quickly"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # qwix 0.1.8 calls what newer Flax deprecates
]

TX = optax.adam(1e-2)
BATCH = {
    "x": np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32),
    "y": np.random.default_rng(1).integers(0, 16, 16).astype(np.int32),
}


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.relu(nn.Dense(64)(x)))


class NNXMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.last = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def loss_of(module, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(module(batch["x"]), batch["y"])
    return js.Mean(losses.sum(), len(losses))


def linen_model(rules):
    return js.linen(qwix.quantize_model(LinenMLP(), qwix.QtProvider(rules)), loss_of, BATCH)


def nnx_model(rules):
    def make(rngs):
        return qwix.quantize_model(NNXMLP(rngs), qwix.QtProvider(rules), BATCH["x"])

    return js.nnx(make, loss_of)


MODELS = {"linen": linen_model, "nnx": nnx_model}


def mesh_of(name):
    if name == "tensor":
        return js.compose(js.fsdp("data"), js.tensor()), js.make_mesh(data=4, tensor=2)
    return js.fsdp(), js.make_mesh(jax.devices()[: 1 if name == "one" else 8], data=-1)


@cache
def one_device(kind, quant):
    return losses_of(MODELS[kind]([] if quant is None else js.models.quant_rules(quant)), "one", js.auto())


def losses_of(model, where, engine, steps=3):
    strategy, mesh = mesh_of(where)
    layout = js.layout(strategy, mesh, model.init, TX)
    run, losses = js.init(model.init, TX, layout, 0), []
    step = js.make_step(model.loss, TX, layout, engine=engine)
    for _ in range(steps):
        run, metrics = step(run, BATCH)
        losses.append(float(metrics["loss"]))
    return losses


CELLS = [(quant, kind, where) for quant in ("int8", "fp8") for kind in MODELS for where in ("fsdp", "tensor")]


@pytest.mark.slow
@pytest.mark.parametrize(("quant", "kind", "where"), CELLS)
def test_losses_are_those_of_one_device(quant, kind, where):
    one = one_device(kind, quant)
    assert abs(one[0] - one_device(kind, None)[0]) > 1e-5  # something was rounded
    for engine in (js.auto(), js.explicit()):
        model = MODELS[kind](js.models.quant_rules(quant))
        np.testing.assert_allclose(losses_of(model, where, engine), one, rtol=0, atol=1e-5)


def test_the_largest_number_of_a_channel_does_not_depend_on_the_last_bit_of_its_scale():
    """qwix's own default for int8 divides by 127.5, a tie that the last bit decides."""
    x = -np.linspace(0.1, 3.0, 1000, dtype=np.float32)[:, None]

    def rounded_by(method):
        scale = np.asarray(qwix.quantize(x, jnp.int8, channelwise_axes=(0,), calibration_method=method).scale)
        return {int(y) for near in (0, np.inf) for y in np.round(x / np.nextafter(scale, np.float32(near))).ravel()}

    (rule,) = js.models.quant_rules("int8")
    assert rounded_by(rule.weight_calibration_method) == {-127}
    assert rounded_by("absmax") == {-127, -128}


def scales_of(monkeypatch, where, engine):
    """Return the weights' scales of all layers and the scales of the first layer's rows, as one step computed them."""
    found = []
    compute = qarray.compute_scale_zero_point

    def record(calibration, qtype):
        scale, zero_point = compute(calibration, qtype)
        jax.debug.callback(lambda x: found.append(np.asarray(x)), scale)
        return scale, zero_point

    with monkeypatch.context() as patch:
        patch.setattr(qarray, "compute_scale_zero_point", record)
        losses_of(linen_model(js.models.quant_rules("int8")), where, engine, steps=1)
        jax.effects_barrier()
    weights = [x for x in found if x.shape[0] == 1]
    assert {x.shape for x in weights} == {(1, 64), (1, 16)}
    largest = np.abs(BATCH["x"]).max(1)
    rows = [x for x in found if x.shape[1:] == (1,) and np.isin(np.round(x * 127, 4), np.round(largest, 4)).all()]
    return [np.unique(np.concatenate([x.ravel() for x in some])) for some in (weights, rows)]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "engine"), [("fsdp", js.auto()), ("fsdp", js.explicit()), ("tensor", js.auto())])
def test_scales_are_those_of_one_device_bit_for_bit(monkeypatch, where, engine):
    for ours, one in zip(scales_of(monkeypatch, where, engine), scales_of(monkeypatch, "one", js.auto())):
        np.testing.assert_array_equal(ours.view(np.int32), one.view(np.int32))
    assert len(one) == len(BATCH["x"])


UNSUITED = {
    "bwd_qtype": {"bwd_qtype": jnp.int8},
    "disable_channelwise_axes": {"disable_channelwise_axes": True},
    "act_static_scale": {"act_static_scale": True},
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", UNSUITED)
def test_rules_whose_scales_read_all_rows_are_refused_under_explicit_by_name(name):
    rule = qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8, **UNSUITED[name])
    module = qwix.quantize_model(LinenMLP(), qwix.QtProvider([rule]))
    params = jax.eval_shape(lambda: LinenMLP().init(jax.random.key(0), BATCH["x"])["params"])
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), params)

    def loss_fn(params, batch, key):
        return loss_of(lambda x: module.apply({"params": params}, x), batch)

    layout = js.layout(js.fsdp(), js.make_mesh(data=8), lambda key: params, TX)
    step = js.make_step(loss_fn, TX, layout, engine=js.explicit())
    with pytest.raises(ValueError, match=rf"qwix: the rule for dot_general .*{name}=.*\['data'\].*js.auto\(\)"):
        step.trace(BATCH)


@pytest.mark.slow
def test_gradients_in_8_bits_under_auto_are_those_of_one_device():
    rounded = jnp.float8_e4m3fn
    model = linen_model([qwix.QtRule(weight_qtype=rounded, act_qtype=rounded, bwd_qtype=jnp.float8_e5m2)])
    np.testing.assert_allclose(
        losses_of(model, "fsdp", js.auto()), losses_of(model, "one", js.auto()), rtol=0, atol=1e-3
    )
