"""Where `js.expert` places arrays: experts split while they are used, rows over the same axis, fills beside it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

import jaxshard as js

E, C, F = 8, 64, 48


def init(key, experts=E):
    """Router, an attention-like matrix and experts [E, C, F] and [E, F, C], named by paths that js.RULES know."""
    shapes = {"dense/kernel": (C, 512), "moe/router/kernel": (C, experts), "moe/wi": (experts, C, F)}
    shapes |= {"moe/wo": (experts, F, C)}
    keys = jax.random.split(key, len(shapes))
    return {path: jax.random.normal(k, shape) for k, (path, shape) in zip(keys, shapes.items())}


def layout_of(strategy, init_fn=init, tx=None, **axes):
    return js.layout(strategy, js.make_mesh(**axes), init_fn, optax.adam(1e-3) if tx is None else tx)


def places(layout, name):
    placement = layout.params[name]
    return placement.use, placement.store


def test_experts_are_used_split_and_rows_are_split_too():
    layout = layout_of(js.compose(js.fsdp("data"), js.expert()), data=2, expert=4)
    assert layout.expert.axis == ("expert",)
    assert layout.batch_axes == ("data", "expert")
    assert places(layout, "moe/wi") == (P("expert", None, None), P("expert", "data", None))
    assert places(layout, "moe/wo") == (P("expert", None, None), P("expert", "data", None))
    assert places(layout, "dense/kernel") == (P(None, None), P("data", None))
    assert layout.params["moe/router/kernel"].use == P(None, None)
    moment = layout.opt_state[0].mu["moe/wi"]
    assert moment.store == layout.grads["moe/wi"].store == P("expert", "data", None)
    assert "experts: *moe*/wi" in layout.explain()
    rows = jax.ShapeDtypeStruct((16, 3), jnp.float32)
    assert layout.batch_placement(rows).store == layout.batch_placement(rows).use == P(("data", "expert"), None)


def test_the_order_in_which_strategies_are_written_makes_no_difference():
    parts = js.expert("data"), js.fsdp("data"), js.tensor()
    one, other = (layout_of(js.compose(*order), data=4, tensor=2) for order in (parts, parts[::-1]))
    assert one.params == other.params and one.batch_axes == other.batch_axes == ("data",)


def test_a_fill_over_both_axes_takes_what_is_left_of_them():
    layout = layout_of(js.compose(js.fsdp(("data", "expert")), js.expert("expert")), data=2, expert=4)
    assert layout.batch_axes == ("data", "expert")
    assert layout.params["moe/wi"].store == P("expert", "data", None)
    assert layout.params["dense/kernel"].store == P(("data", "expert"), None)


def test_tensor_splits_the_hidden_dimension_of_every_expert():
    layout = layout_of(js.compose(js.ddp("data"), js.expert(), js.tensor()), data=2, expert=2, tensor=2)
    assert places(layout, "moe/wi") == (P("expert", None, "tensor"),) * 2
    assert places(layout, "moe/wo") == (P("expert", "tensor", None),) * 2


def test_a_model_names_its_experts_itself():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            weights = nn.with_partitioning(nn.initializers.normal(), ("expert", None, None))
            return x @ self.param("weights", weights, (4, 8, 8))[0] + self.param("bias", nn.initializers.zeros, (8,))

    batch = {"x": jnp.zeros((8, 8))}
    init_fn, _ = js.linen(Layer(), lambda apply, batch: js.Mean(apply(batch["x"]).sum(), 1.0), batch)
    made = layout_of(js.compose(js.ddp("data"), js.expert()), init_fn, expert=4, data=2)
    assert made.params["weights"].use == P("expert", None, None) and made.params["bias"].use == P(None)


def test_rules_name_experts():
    rules = [("up/*", (None, "expert", None)), *js.RULES]
    layout = layout_of(js.expert(rules=rules), lambda key: {"up/w": jnp.zeros((3, 8, 5)), "b": jnp.zeros(3)}, expert=8)
    assert layout.params["up/w"].use == P(None, "expert", None)


def test_what_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"4 devices of axis 'expert' do not divide the number of experts") as error:
        layout_of(js.expert(), lambda key: init(key, 6), expert=4, data=2)
    assert "moe/wi [6, 64, 48]: 6 experts" in str(error.value) and "moe/wo [6, 48, 64]" in str(error.value)
    with pytest.raises(ValueError, match="no parameter has a dimension of experts"):
        layout_of(js.expert(), lambda key: {"w": jnp.zeros((8, 8))}, expert=8)
    with pytest.raises(ValueError, match="has no axis 'expert'"):
        layout_of(js.expert(), data=8)
    with pytest.raises(ValueError, match=r"12 rows, which the 8 devices of axis 'data' x 'expert' do not divide"):
        layout_of(js.compose(js.ddp(), js.expert()), data=2, expert=4).batch_placement(jnp.zeros((12, 2)))
    with pytest.raises(TypeError, match=r"write js.expert\(...\), not js.expert"):
        js.compose(js.ddp(), js.expert)
    with pytest.raises(ValueError, match="exchange must be \"equal\" or None, got 'ragged'"):
        js.expert(exchange="ragged")
