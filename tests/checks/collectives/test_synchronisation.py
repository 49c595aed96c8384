"""The audit of a step under `js.local`: what synchronises replicas is promised, and how seldom."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest

import jaxshard as js
from tests.local_reference import MODEL, batches

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def audit(inside: Any, engine: Any = None, **how: Any) -> Any:
    mesh = js.make_mesh(jax.devices()[:8], replica=2, data=4)
    layout = js.layout(js.compose(inside, js.local("replica", **how)), mesh, MODEL.init, TX)
    return js.audit(js.make_step(MODEL.loss, TX, layout, engine=engine or js.explicit()), batches(1)[0])


def rows(found: Any) -> list[tuple[Any, ...]]:
    return [(row["kind"], row["axis"], row["promised"], row["bytes"]) for row in found.rows()]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [js.explicit(), js.auto()], ids=["explicit", "auto"])
@pytest.mark.parametrize("warmup", [0, 80])
def test_fsdp_inside_moves_a_shard_of_each_parameter_over_the_replicas(engine: Any, warmup: int) -> None:
    found = audit(js.fsdp("data", min_size=0), engine, every=8, warmup=warmup)
    assert found.ok, str(found)
    # 9 flags of bad steps, and of 4,928 bytes of parameters a quarter; in the warm-up as much of their gradients.
    moved = 36 + (2 if warmup else 1) * 1232
    assert [row for row in rows(found) if row[1] == "replica"] == [("all-reduce", "replica", moved, moved)]
    assert ("of these in the first 80 steps alone: all-reduce over replica, 1.23 kB" in str(found)) is bool(warmup)
    assert "of these once in 8 steps: all-reduce over replica, 1.23 kB, 154 B a step" in str(found)
    assert "promised, but not found" not in str(found)
