"""The core of a matrix runs on the device that owns it, and nowhere else."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jaxshard as js
from jaxshard.core.owners import OwnedStack
from jaxshard.optim.owners.update import _for_each_slot


def test_devices_without_a_matrix_do_not_run_its_core() -> None:
    """One matrix, 8 devices with a place each: all turns of the loop read the same, and stay in it."""
    stack = OwnedStack(("w",), (0,), 0, (6, 6), ("data",), 8, 1, (3,), (), (("float32",), ("float32",)), 1)

    def core(whole: list[jax.Array], rows: Any, states: Any) -> list[jax.Array]:
        return [jnp.linalg.eigh(whole[0])[1]]

    run = jax.shard_map(
        lambda x: _for_each_slot(stack, core, [x], ([], []), []),
        mesh=js.make_mesh(data=8),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )
    text = jax.jit(run).lower(jax.ShapeDtypeStruct((8, 6, 6), jnp.float32)).compile().as_text() or ""
    _, entry = text.split("ENTRY ")
    assert "syevd" in text and "syevd" not in entry
