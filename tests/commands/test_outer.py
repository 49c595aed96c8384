"""`--outer`: the transforms that its values stand for."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxshard.commands.parallel import read_outer


def moves(text, gradients):
    tx = read_outer(text)
    state, found = tx.init(jnp.zeros(())), []
    for gradient in gradients:
        update, state = tx.update(jnp.asarray(gradient), state)
        found.append(float(update))
    return found


def test_no_value_leaves_the_choice_to_the_strategy():
    assert read_outer(None) is None


@pytest.mark.parametrize(
    ("text", "updates"),
    [
        ("average", [-1.0, -2.0]),
        ("rate=0.5", [-0.5, -1.0]),
        ("rate=0.5, momentum=0", [-0.5, -1.0]),
        # Of gradients 1 and 2 the sums are 1 and 2.5, and a step goes along gradient + half of the sum.
        ("rate=1,momentum=0.5", [-1.5, -3.25]),
    ],
)
def test_a_value_stands_for_gradient_descent(text, updates):
    assert moves(text, [1.0, 2.0]) == updates
