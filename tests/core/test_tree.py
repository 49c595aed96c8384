"""Leaves with their paths, and rows of batches."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.core.tree import check_same_tree, find_by_suffix, row_count


def test_rows_are_those_of_the_arrays_and_not_of_the_scalars():
    assert row_count({"x": np.zeros((6, 2)), "y": jnp.zeros(6), "scale": 2.0}) == 6
    assert row_count({"scale": 2.0}) == row_count({}) == 0


def test_the_longest_end_of_a_path_with_the_same_shape_is_found():
    known = {("w",): ((2,), "short"), ("a", "w"): ((2,), "long"), ("b", "w"): ((3,), "other shape")}
    assert find_by_suffix(known, ("mu", "a", "w"), (2,)) == "long"
    assert find_by_suffix(known, ("mu", "b", "w"), (2,)) == "short"
    assert find_by_suffix(known, ("mu", "b", "w"), (4,)) is None


def test_every_leaf_that_differs_is_named():
    expected = {"a": jnp.zeros(2), "b": jnp.zeros(3), "c": jnp.zeros(4)}
    received = {"a": jnp.zeros(2), "b": jnp.zeros(5), "d": jnp.zeros(4)}
    with pytest.raises(ValueError) as error:
        check_same_tree(expected, received, "they differ", "fix it")
    assert str(error.value).splitlines() == [
        "they differ; fix it",
        "  - c: missing, expected float32[4]",
        "  - d: unexpected, float32[4]",
        "  - b: expected float32[3], got float32[5]",
    ]
