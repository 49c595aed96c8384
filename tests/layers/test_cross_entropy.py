"""Cross-entropy equals optax's, and never moves split logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import jaxshard as js
from jaxshard.core.constrain import follow_layout
from jaxshard.hlo.found import collectives


@pytest.mark.parametrize(("shape", "vocab"), [((), 9), ((4, 1, 3), 7), ((2,), 1)])
def test_equals_optax_with_its_gradient(shape, vocab):
    """Within 1e-6."""
    rng = np.random.default_rng(3)
    logits = 9 * rng.normal(size=(*shape, vocab)).astype(np.float32)
    labels = rng.integers(0, vocab, shape, dtype=np.int32)

    @jax.jit
    def both(logits):
        functions = (js.cross_entropy, optax.softmax_cross_entropy_with_integer_labels)
        return [(f(logits, labels), jax.grad(lambda x, f=f: f(x, labels).sum())(logits)) for f in functions]

    (loss, gradient), (expected, wanted) = both(logits)
    np.testing.assert_allclose(loss, expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint32])
def test_labels_of_any_integer_dtype(dtype):
    """More classes than a byte can count."""
    logits, labels = np.random.default_rng(1).normal(size=(4, 300)).astype(np.float32), np.array([0, 1, 100, 43])
    expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(4), labels]
    np.testing.assert_allclose(jax.jit(js.cross_entropy)(logits, labels.astype(dtype)), expected, rtol=1e-6)


def test_classes_that_the_tensor_axis_does_not_divide_stay_where_they_are():
    init = lambda key: {"fc1": {"kernel": jnp.zeros((8, 8))}}  # noqa: E731
    layout = js.layout(js.compose(js.ddp(), js.tensor()), js.make_mesh(data=2, tensor=4), init, optax.sgd(0.1))
    with follow_layout(layout):
        assert jax.eval_shape(js.cross_entropy, jnp.zeros((2, 10)), jnp.zeros(2, jnp.int32)).shape == (2,)


def test_low_precision_is_summed_in_f32():
    logits = jnp.zeros((1, 1000), jnp.bfloat16)
    loss = jax.jit(js.cross_entropy)(logits, jnp.zeros(1, jnp.int32))
    assert loss.dtype == jnp.float32 and float(loss[0]) == pytest.approx(np.log(1000), rel=1e-6)


def test_split_logits_are_not_moved():
    """Forward and backward: three all-reduces of one number per label, combined or not, and nothing else."""
    mesh = js.make_mesh(data=2, tensor=4)
    logits = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32, sharding=NamedSharding(mesh, jax.P("data", None, "tensor")))
    labels = jax.ShapeDtypeStruct((8, 4), jnp.int32, sharding=NamedSharding(mesh, jax.P("data")))

    def loss(logits, labels):
        nats = js.cross_entropy(logits, labels, ignore_index=-100)
        return jax.lax.with_sharding_constraint(nats, NamedSharding(mesh, jax.P("data"))).sum(1)

    def both(logits, labels):
        value, pull = jax.vjp(lambda x: loss(x, labels), logits)
        return value, pull(jnp.ones_like(value))[0]

    found = collectives(jax.jit(both).lower(logits, labels).compile(), mesh)
    assert {one.kind for one in found} == {"all-reduce"} and {one.axes for one in found} == {("tensor",)}
    assert sum(one.bytes for one in found) == 3 * 4 * 4 * 4


IGNORED = -100
LABELS = np.array([3, IGNORED, 0, 4, IGNORED], np.int32)


def logits_of(count=5, vocab=5):
    return np.random.default_rng(2).normal(size=(count, vocab)).astype(np.float32)


@jax.jit
def nats_and_grads(logits, labels):
    return jax.vmap(jax.value_and_grad(js.cross_entropy))(logits, labels)


@pytest.mark.parametrize(
    "ignore",
    [
        {"ignore_index": IGNORED},
        {"where": LABELS >= 0},
        {"where": jnp.arange(5) != 1, "ignore_index": IGNORED},
        {"where": np.array([True, False, True, True, False])},
    ],
    ids=["index", "where", "both", "numpy"],
)
def test_ignored_labels_have_a_loss_and_gradients_of_zero(ignore):
    """Also where the logits of ignored rows are NaN or infinite, as padding makes them."""
    logits = logits_of()
    logits[1], logits[4] = np.nan, np.inf
    counts = np.array([0, 2, 3])

    def total(logits):
        nats = js.cross_entropy(logits, LABELS, **ignore)
        return (nats * jnp.arange(1, 6)).sum(), nats

    (_, nats), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(logits)
    alone = nats_and_grads(logits[counts], LABELS[counts])
    np.testing.assert_array_equal(nats[np.array([1, 4])], 0)
    np.testing.assert_array_equal(grad[np.array([1, 4])], 0)
    np.testing.assert_allclose(nats[counts], alone[0], rtol=1e-6)
    np.testing.assert_allclose(grad[counts], alone[1] * (counts + 1)[:, None], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("label", [-1, 5, -100, 2**31 - 1, -(2**31)])
def test_other_labels_outside_of_the_vocabulary_are_nan(label):
    nats, ignoring_others, counted, gradient = losses_with(np.array([3, label, 0], np.int32), np.int32(label))
    assert np.isnan(nats).tolist() == np.isnan(ignoring_others).tolist() == [False, True, False]
    assert counted[1] == 0
    # A mask that multiplies comes too late; one that chooses does not, and the gradient stays finite.
    assert np.isnan((nats * np.array([1, 0, 1])).sum())
    assert np.isfinite(gradient).all()


@jax.jit
def losses_with(labels, odd):
    """As they are, with an index to ignore that there is not, where the odd one is left out, and a chosen gradient."""
    return (
        js.cross_entropy(logits_of(3), labels),
        js.cross_entropy(logits_of(3), labels, ignore_index=4),
        js.cross_entropy(logits_of(3), labels, where=labels != odd),
        jax.grad(lambda x: jnp.where(labels != odd, js.cross_entropy(x, labels), 0).sum())(jnp.asarray(logits_of(3))),
    )


@pytest.mark.parametrize(
    "label", [np.uint8(255), np.uint8(200), np.int8(-100), np.int64(2**32 + 1), np.uint32(2**32 - 1)], ids=str
)
def test_no_label_wraps_around_into_the_vocabulary(label):
    assert np.isnan(js.cross_entropy(logits_of(1), label[None])[0])
    ignored = js.cross_entropy(logits_of(1), label[None], ignore_index=-100)[0]
    assert np.isnan(ignored) if label != -100 else ignored == 0


@pytest.mark.parametrize(
    ("ignore", "error", "message"),
    [
        ({"where": np.ones(5, np.float32)}, ValueError, "where must be boolean.*got float32; write where=mask != 0"),
        ({"where": np.ones((2, 5), bool)}, ValueError, r"where \[2, 5\] does not broadcast to the labels \[5\]"),
        ({"ignore_index": -100.0}, TypeError, "ignore_index must be an integer such as -100, got -100.0"),
        ({"ignore_index": True}, TypeError, "ignore_index must be an integer"),
    ],
)
def test_what_does_not_say_which_labels_count(ignore, error, message):
    with pytest.raises(error, match=message):
        js.cross_entropy(logits_of(), LABELS, **ignore)


@pytest.mark.parametrize("labels", [np.zeros((3,), np.int32), np.zeros((2,), np.float32)])
def test_labels_that_do_not_fit(labels):
    with pytest.raises(ValueError, match=r"logits \[..., V\] need integer labels"):
        js.cross_entropy(jnp.zeros((2, 5)), labels)
