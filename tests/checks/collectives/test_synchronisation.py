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
def test_fsdp_inside_moves_a_shard_of_each_parameter_over_the_replicas() -> None:
    found = audit(js.fsdp("data", min_size=0), every=8)
    assert found.ok, str(found)
    # 4,928 bytes of parameters, of which each device has a quarter; and 9 flags of bad steps.
    assert rows(found) == [
        ("all-reduce", "replica", 1268, 1268),
        ("reduce-scatter", "data", 4928, 4928),
        ("all-gather", "data", 9024, 9024),
    ]
    assert "of these once in 8 steps: all-reduce over replica, 1.23 kB, 154 B a step" in str(found)
    assert "promised, but not found" not in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [js.explicit(), js.auto()], ids=["explicit", "auto"])
def test_a_warm_up_reduces_a_shard_of_each_gradient_in_its_steps_alone(engine: Any) -> None:
    found = audit(js.fsdp("data", min_size=0), engine, every=8, warmup=80)
    assert found.ok, str(found)
    # The flags, and twice a quarter of the parameters.
    assert [row for row in rows(found) if row[1] == "replica"] == [("all-reduce", "replica", 2500, 2500)]
    assert "of these in the first 80 steps alone: all-reduce over replica, 1.23 kB" in str(found)
    assert "of these once in 8 steps: all-reduce over replica, 1.23 kB, 154 B a step" in str(found)
    assert "promised, but not found" not in str(found)
