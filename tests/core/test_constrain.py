"""Activations by name: where they end up, what is refused, and a no-op without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.core.constrain import follow_layout, is_split

SEQUENCE = [("sequence", "split"), *js.RULES]


def layout(*parts, **axes):
    return js.layout(
        js.compose(*parts), js.make_mesh(**axes), lambda key: {"fc1": {"kernel": jnp.zeros((8, 8))}}, optax.sgd(0.1)
    )


def placed(made, shape, names):
    """The sharding of a constrained array of zeros."""
    with follow_layout(made):
        return jax.jit(lambda: js.constrain(jnp.zeros(shape), names))().sharding.spec


def test_without_a_mesh_it_is_the_array_itself():
    x = jnp.ones((4, 8))
    assert js.constrain(x, ("batch", "anything")) is x and not is_split("heads")


def test_names_are_split_as_rules_and_batch_axes_say():
    made = layout(js.ddp(), js.tensor(), data=2, tensor=4)
    assert placed(made, (4, 16, 8, 4), ("batch", None, "heads", None)) == jax.P("data", None, "tensor")
    assert placed(made, (4, 16, 8), ("batch", "sequence", None)) == jax.P("data")
    made = layout(js.ddp(), js.tensor(SEQUENCE), data=2, tensor=4)
    assert placed(made, (4, 16, 8), ("batch", "sequence", None)) == jax.P("data", "tensor")
    with follow_layout(made):
        assert is_split("sequence") and not is_split("embed")


def test_without_a_tensor_axis_names_say_nothing():
    made = layout(js.fsdp(), data=8)
    assert placed(made, (8, 6), ("batch", "heads")) == jax.P("data")


def test_the_gradient_goes_where_it_is_told():
    made = layout(js.ddp(), js.tensor(SEQUENCE), data=2, tensor=4)

    def cotangent_of(grad):
        def f(x):
            return (js.constrain(x, ("batch", None), grad=grad) * jnp.arange(8.0)).sum()

        with follow_layout(made):
            return jax.jit(jax.grad(f))(jnp.ones((4, 8)))

    whole, split = cotangent_of(None), cotangent_of(("batch", "sequence"))
    assert whole.sharding.spec == jax.P("data") and split.sharding.spec == jax.P("data", "tensor")
    np.testing.assert_array_equal(whole, split)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("batch",), r"1 names \('batch',\) for an array of shape \[4, 6\]"),
        (("batch", "headz"), "no rule knows the name 'headz'"),
        (("batch", "heads"), r"constrain \(heads\) has 6 elements, which the 4 devices .* would work: 4 or 8"),
    ],
)
def test_what_does_not_fit(names, message):
    with pytest.raises(ValueError, match=message):
        placed(layout(js.ddp(), js.tensor(), data=2, tensor=4), (4, 6), names)


def test_a_function_compiled_without_a_mesh_is_compiled_again_for_one():
    seen = []

    @jax.jit
    def f(x):
        seen.append(is_split("sequence"))
        return js.constrain(x, ("batch", "sequence"))

    x = jnp.ones((4, 8))
    f(x)
    with follow_layout(layout(js.ddp(), js.tensor(SEQUENCE), data=2, tensor=4)):
        f(x)
    assert seen == [False, True]
