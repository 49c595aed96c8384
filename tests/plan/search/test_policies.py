"""What a search lets blocks keep: policies of the names that a block's own program has."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxshard as js
from jaxshard.adapt.remat import BLOCK_IN, policy_function
from jaxshard.plan.search.policies import policies_of, remat_of

WIDTH, ROWS = 64, 8
WEIGHTS = {
    "up": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.bfloat16),
    "down": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.bfloat16),
}
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
ROW = ROWS * WIDTH * 2


def block(weights, x):
    x = checkpoint_name(x, BLOCK_IN)
    wide = jnp.tanh(checkpoint_name(x @ weights["up"], "wide"))
    return x + checkpoint_name(jnp.tanh(checkpoint_name(wide @ weights["down"], "narrow")), "unused")


@pytest.fixture(scope="module")
def found():
    return {policy.text: policy for policy in policies_of(block, WEIGHTS, X)}


def test_names_are_those_of_the_model_the_most_work_for_a_byte_first(found):
    # Both products cost as much; what "narrow" keeps is a quarter.
    assert list(found) == [
        "everything", "dots", "nothing", "block_in=offload",
        "narrow=save", "narrow=save,block_in=offload", "narrow=offload,block_in=offload",
        "narrow=save,wide=save", "narrow=save,wide=save,block_in=offload",
        "narrow=offload,wide=offload,block_in=offload",
    ]  # fmt: skip


def test_what_is_kept_moved_and_computed_again(found):
    assert (found["nothing"].kept, found["block_in=offload"].kept, found["block_in=offload"].moved) == (ROW, 0, ROW)
    both = found["narrow=save,wide=save,block_in=offload"]
    assert (both.kept, both.moved) == (ROW + 4 * ROW, ROW)
    assert found["narrow=offload,wide=offload,block_in=offload"].moved == 6 * ROW
    # Six products of equal size in a step: both forward, and two of each backward.
    assert found["nothing"].again == pytest.approx(2 / 6) and both.again == pytest.approx(0.03)
    assert found["narrow=save"].again == pytest.approx(1 / 6)


def test_engines_take_every_policy(found):
    for text in found:
        policy_function(remat_of(text))
        js.explicit(remat=remat_of(text))


def test_a_block_without_names_has_its_input_alone():
    plain = [one.text for one in policies_of(lambda w, x: x + jnp.tanh(x @ w["up"])[:, :WIDTH], WEIGHTS, X)]
    assert plain == ["everything", "dots", "nothing", "block_in=offload"]
