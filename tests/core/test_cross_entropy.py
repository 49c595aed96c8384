"""Cross-entropy equals optax's, and never moves split logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import jaxshard as js
from jaxshard.checks.collectives.found import collectives
from jaxshard.core.constrain import follow_layout


@settings(deadline=None, max_examples=3)
@given(shape=st.lists(st.integers(1, 4), max_size=3), vocab=st.integers(1, 9), seed=st.integers(0, 99))
def test_equals_optax_with_its_gradient(shape, vocab, seed):
    """Within 1e-6."""
    rng = np.random.default_rng(seed)
    logits = 9 * rng.normal(size=(*shape, vocab)).astype(np.float32)
    labels = rng.integers(0, vocab, shape, dtype=np.int32)
    for ours, theirs in [(js.cross_entropy, optax.softmax_cross_entropy_with_integer_labels)]:
        np.testing.assert_allclose(ours(logits, labels), theirs(logits, labels), rtol=1e-6, atol=1e-5)
        grads = [jax.grad(lambda x, f=f: f(x, labels).sum())(jnp.asarray(logits)) for f in (ours, theirs)]
        np.testing.assert_allclose(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint32])
def test_labels_of_any_integer_dtype(dtype):
    """More classes than a byte can count."""
    logits, labels = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32), np.array([0, 1, 100, 43])
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels.astype(np.int32))
    np.testing.assert_allclose(js.cross_entropy(logits, labels.astype(dtype)), expected, rtol=1e-6)


def test_classes_that_the_tensor_axis_does_not_divide_stay_where_they_are():
    init = lambda key: {"fc1": {"kernel": jnp.zeros((8, 8))}}  # noqa: E731
    layout = js.layout(js.compose(js.ddp(), js.tensor()), js.make_mesh(data=2, tensor=4), init, optax.sgd(0.1))
    with follow_layout(layout):
        assert js.cross_entropy(jnp.zeros((2, 10)), jnp.zeros(2, jnp.int32)).shape == (2,)


def test_low_precision_is_summed_in_f32():
    logits = jnp.zeros((1, 1000), jnp.bfloat16)
    loss = js.cross_entropy(logits, jnp.zeros(1, jnp.int32))
    assert loss.dtype == jnp.float32 and float(loss[0]) == pytest.approx(np.log(1000), rel=1e-6)


def test_split_logits_are_not_moved():
    """Forward and backward: three all-reduces of one number per label, combined or not, and nothing else."""
    mesh = js.make_mesh(data=2, tensor=4)
    logits = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32, sharding=NamedSharding(mesh, jax.P("data", None, "tensor")))
    labels = jax.ShapeDtypeStruct((8, 4), jnp.int32, sharding=NamedSharding(mesh, jax.P("data")))

    def loss(logits, labels):
        nats = js.cross_entropy(logits, labels)
        return jax.lax.with_sharding_constraint(nats, NamedSharding(mesh, jax.P("data"))).sum(1)

    def both(logits, labels):
        value, pull = jax.vjp(lambda x: loss(x, labels), logits)
        return value, pull(jnp.ones_like(value))[0]

    found = collectives(jax.jit(both).lower(logits, labels).compile(), mesh)
    assert {one.kind for one in found} == {"all-reduce"} and {one.axes for one in found} == {("tensor",)}
    assert sum(one.bytes for one in found) == 3 * 4 * 4 * 4


@pytest.mark.parametrize("labels", [np.zeros((3,), np.int32), np.zeros((2,), np.float32)])
def test_labels_that_do_not_fit(labels):
    with pytest.raises(ValueError, match=r"logits \[..., V\] need integer labels"):
        js.cross_entropy(jnp.zeros((2, 5)), labels)
