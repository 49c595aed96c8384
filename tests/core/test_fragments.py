"""Fragments of a model: every element in exactly one, bytes nearly equal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.core.fragments import Cut, cut_fragments, of_fragment, put_fragment


def params(blocks: int = 6) -> dict[str, Any]:
    sizes = {"embed": (40, 8), "blocks": {"w": (blocks, 8, 8), "b": (blocks, 8)}, "head": (8, 40), "scale": ()}
    made = iter(range(99))
    return jax.tree.map(
        lambda shape: jnp.arange(np.prod(shape, dtype=int)).reshape(shape) + 1000 * next(made),
        sizes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize("count", [2, 9])
def test_every_element_is_in_one_fragment(count: int) -> None:
    model = params()
    rebuilt = jax.tree.map(jnp.zeros_like, model)
    total = 0
    for part in cut_fragments(model, count):
        taken = of_fragment(part, Cut.take, model)
        total += sum(x.size for x in jax.tree.leaves(taken))
        rebuilt = put_fragment(part, taken, rebuilt)
        shapes = of_fragment(part, Cut.shape, model)
        assert [x.shape for x in jax.tree.leaves(shapes)] == [x.shape for x in jax.tree.leaves(taken)]
    jax.tree.map(np.testing.assert_array_equal, rebuilt, model)
    assert total == sum(x.size for x in jax.tree.leaves(model))


def test_bytes_are_nearly_equal_and_blocks_are_runs() -> None:
    model = params()
    sizes = [
        sum(x.size for x in jax.tree.leaves(of_fragment(part, Cut.take, model))) for part in cut_fragments(model, 2)
    ]
    assert sizes == [537, 536]  # embed and head 320 each, a block 72, one number
    first, second = (part["blocks"]["w"] for part in cut_fragments(model, 2))
    assert (first, second) == (Cut(0, 3), Cut(3, 6))


def test_frozen_arrays_are_in_none() -> None:
    model = params() | {"head": None}
    parts = cut_fragments(model, 2)
    assert all(part["head"] is None for part in parts)


def test_more_fragments_than_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match="fragments=10 of a model with 9 pieces"):
        cut_fragments(params(), 10)
