"""Stacked matrices that are updated one by one, and those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import jaxshard as js
from jaxshard.optim.owners.cores import find_cores
from jaxshard.optim.owners.slices import has_own_slices, is_program_of_one
from tests.optim.owners.shampoo import shampoo
from tests.optim.owners.soap import soap


def _params(count: int) -> Any:
    return {"blocks": {"w": jax.ShapeDtypeStruct((count, 6, 4), jnp.float32)}}


def _batched(fn: Callable[[jax.Array], jax.Array]) -> optax.GradientTransformation:
    return optax.GradientTransformation(lambda params: (), lambda g, s, p=None: (jax.tree.map(fn, g), s))


_thrice = jax.vmap(lambda x: x @ x.T @ x)


OWN = {
    "muon per block": js.optim.per_block(contrib.muon(0.1)),
    "shampoo per block": js.optim.per_block(shampoo(0.1)),
    "soap per block": js.optim.per_block(soap(0.1)),
    "muon by dimension numbers": contrib.muon(
        0.1, muon_weight_dimension_numbers={"blocks": {"w": contrib.MuonDimensionNumbers(1, 2)}}
    ),
    "a product and a sort": _batched(jax.vmap(lambda x: jnp.sort(x @ x.T, axis=0) @ x)),
}
MIXED = {
    "a sum over blocks": _batched(lambda g: (g @ g.mT) @ g - g.mean(0)),
    "blocks in another order": _batched(lambda g: (g @ g.mT @ g)[::-1]),
    "a product over blocks": _batched(lambda g: jnp.einsum("lk,kij->lij", jnp.einsum("lij,kij->lk", g, g), g)),
    "the number of the block": _batched(lambda g: (g @ g.mT @ g) * jnp.arange(3.0)[:, None, None]),
}


@pytest.mark.parametrize("name", OWN)
def test_blocks_that_are_updated_one_by_one_are_proven_to_be(name: str) -> None:
    whole, one = (find_cores(OWN[name], _params(count), {0}) for count in (3, 1))
    assert whole is not None and one is not None
    assert has_own_slices(whole.cores[0], 3) is not None
    assert is_program_of_one(whole.cores[0], one.cores[0], 3)


@pytest.mark.parametrize("name", MIXED)
def test_blocks_that_meet_are_not(name: str) -> None:
    made = find_cores(MIXED[name], _params(3), {0})
    assert made is None or not made.cores or has_own_slices(made.cores[0], 3) is None


def test_a_number_that_depends_on_how_many_there_are_is_another_program() -> None:
    tx = _batched(lambda g: _thrice(g) * (1.0 / g.shape[0]))
    whole, one = (find_cores(tx, _params(count), {0}) for count in (3, 1))
    assert whole is not None and one is not None
    in_core = is_program_of_one(whole.cores[0], one.cores[0], 3)
    # The factor is elementwise and stays outside, where the whole program with its own number runs.
    assert in_core and has_own_slices(whole.cores[0], 3) is not None
    inner = _batched(lambda g: _thrice(_thrice(g) * (1.0 / g.shape[0])))
    whole, one = (find_cores(inner, _params(count), {0}) for count in (3, 1))
    assert whole is not None and one is not None
    assert not is_program_of_one(whole.cores[0], one.cores[0], 3)
