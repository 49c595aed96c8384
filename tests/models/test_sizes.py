"""Ready-made models by name: published numbers of parameters, changes, and what names and arguments there are."""

import math

import jax
import jax.numpy as jnp
import pytest

import jaxshard as js

KEY = jax.random.key(0)


def count(name, **changes):
    shapes = jax.eval_shape(js.models.make(name, **changes).init, KEY)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-16b", 16_375_728_128),
    ],
)
def test_the_published_numbers_of_parameters(name, parameters):
    assert count(name) == parameters


@pytest.mark.slow
def test_every_size_makes_a_model_and_has_a_recipe():
    for name, size in js.models.SIZES.items():
        assert 0.9e6 < count(name) < 406e9
        assert size.recipe.batch * size.shape["seq"] <= 2**25 and size.recipe.warmup < size.recipe.steps


@pytest.mark.slow
def test_changes_take_the_place_of_the_sizes_own_arguments():
    model = js.models.make("llama3-8b", width=32, depth=2, heads=2, kv_heads=1, hidden=48, seq=8, vocab=40, head_dim=6)
    params = jax.jit(model.init)(KEY)
    assert params["blocks"]["k_proj"]["kernel"].shape == (2, 32, 1, 6)
    batch = {"tokens": jnp.zeros((2, 9), jnp.int32)}
    assert float(jax.jit(model.loss)(params, batch, KEY).weights[0]) == 16
    assert set(model.evaluate(params, batch)) == {"loss", "accuracy"}


def test_names_and_arguments_that_there_are_not_are_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"no size 'llama4'; use one of gpt-1m, .*, llama3-405b, .*, deepseek-16b$"):
        js.models.make("llama4")
    with pytest.raises(
        ValueError, match=r"llama has no 'dept', 'hide'; did you mean depth\? Use one of vocab, .*, quant$"
    ):
        js.models.make("llama-1m", dept=3, hide=2)
    with pytest.raises(ValueError, match=r"js.models.gpt has no 'kv_heads'"):
        js.models.make("gpt-1m", kv_heads=3)
    with pytest.raises(ValueError, match="heads 8 is not divisible by kv_heads 3"):
        js.models.make("llama-1m", kv_heads=3)
