"""Owners are balanced by cost, and stacks go back and forth."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

import jaxshard as js


def test_the_most_expensive_matrices_are_given_away_first() -> None:
    """The device without a large matrix has most of the small ones, though not more than twice its share."""

    def init_fn(key: jax.Array) -> Any:
        return {f"large{i}": jnp.zeros((64, 64)) for i in range(3)} | {
            f"small{i}": jnp.zeros((32, 32)) for i in range(8)
        }

    mesh = js.make_mesh(jax.devices()[:4], data=4)
    layout = js.layout(js.fsdp(min_size=0), mesh, init_fn, contrib.muon(0.1))
    assert layout.owners is not None
    large, small = layout.owners.stacks
    assert (large.count, large.counts) == (3, (1, 1, 1, 0))
    assert (small.count, small.counts) == (8, (2, 1, 1, 4))
    most, mean = layout.owners.flops_per_device
    assert most == large.flops + 2 * small.flops and mean == (3 * large.flops + 8 * small.flops) / 4
    assert layout.owners.owner_of("small5") == (3,)
    assert "large0 and 2 more: 3 matrices [64, 64], 0 to 1 on each of 4 devices of data, 1 of 4 places empty" in str(
        layout.owners
    )


def test_parameters_with_hyperparameters_of_their_own_are_in_stacks_of_their_own() -> None:
    def init_fn(key: jax.Array) -> Any:
        return {f"w{i}": jnp.zeros((32, 32)) for i in range(4)}

    labels = {"w0": "a", "w1": "a", "w2": "b", "w3": "b"}
    numbers = contrib.MuonDimensionNumbers(0, 1)

    def muon(steps: int) -> Any:
        return contrib.scale_by_muon(
            ns_steps=steps, weight_dimension_numbers=lambda p: jax.tree.map(lambda _: numbers, p)
        )

    tx = optax.partition({"a": muon(5), "b": muon(3)}, labels)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), init_fn, tx)
    assert layout.owners is not None
    assert [stack.paths for stack in layout.owners.stacks] == [("w0", "w1"), ("w2", "w3")]
