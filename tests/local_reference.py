"""Replicas that train by themselves, as a plain loop on one device: what `js.local` is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js

WIDTH, FEATURES, ROWS = 16, 8, 16

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
"""The outer optimizer of DiLoCo, whose state matters."""


def _init(key: jax.Array) -> Any:
    embed, block, head = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (FEATURES, WIDTH)) / 4,
        "block": {"w": jax.random.normal(block, (WIDTH, WIDTH)) / 4, "b": jnp.zeros((WIDTH,))},
        "head": jax.random.normal(head, (WIDTH,)) / 4,
    }


def _head(params: Any, x: jax.Array, batch: Any, key: Any) -> js.Mean:
    return js.Mean((batch["weights"] * (x @ params["head"] - batch["y"]) ** 2).sum(), batch["weights"].sum())


MODEL = js.Stacked(
    lambda params, batch, key: batch["x"] @ params["embed"],
    lambda params, x, key: x + jnp.tanh(x @ params["w"] + params["b"]),
    _head,
    num_blocks=4,
    init=_init,
)
"""Four blocks of 16 x 16, as `js.Stacked`: 4.93 kB of parameters."""


def batches(count: int) -> list[dict[str, np.ndarray]]:
    """Make batches of 16 rows, half of which weigh nothing."""
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(ROWS, FEATURES)).astype(np.float32),
            "y": rng.normal(size=(ROWS,)).astype(np.float32),
            "weights": rng.permutation(ROWS).astype(np.float32) // (ROWS // 2) + 0.25,
        }
        for _ in range(count)
    ]


def simulate(
    tx: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    given: Sequence[dict[str, np.ndarray]],
    *,
    replicas: int,
    every: int,
    warmup: int = 0,
) -> tuple[Any, list[Any], list[float]]:
    """Train replicas one after the other, and synchronise them after every `every`-th step.

    In the first `warmup` steps one replica takes all rows, as on one device, and the others and the shared parameters
    become what it has.

    Returns:
      (the shared parameters, each replica's own, the losses averaged over replicas).
    """
    shared = MODEL.init(jax.random.key(0))
    own, inner, losses, outer_state = [shared] * replicas, [tx.init(shared)] * replicas, [], outer.init(shared)
    gradient = jax.jit(jax.value_and_grad(lambda p, rows: _value(MODEL.loss(p, rows, jax.random.key(0)))))
    for step, batch in enumerate(given):
        values = []
        if step < warmup:
            value, grads = gradient(shared, batch)
            updates, state = tx.update(grads, inner[0], shared)
            shared = optax.apply_updates(shared, updates)
            own, inner = [shared] * replicas, [state] * replicas
            losses.append(float(value))
            continue
        for r in range(replicas):
            rows = {name: np.split(x, replicas)[r] for name, x in batch.items()}
            value, grads = gradient(own[r], rows)
            updates, inner[r] = tx.update(grads, inner[r], own[r])
            own[r] = optax.apply_updates(own[r], updates)
            values.append(float(value))
        losses.append(sum(values) / replicas)
        if (step + 1) % every == 0:
            mean = jax.tree.map(lambda *x: sum(x) / replicas, *own)
            updates, outer_state = outer.update(jax.tree.map(jnp.subtract, shared, mean), outer_state, shared)
            shared = optax.apply_updates(shared, updates)
            own = [shared] * replicas
    return shared, own, losses


def _value(loss: js.Mean | js.Loss) -> jax.Array:
    mean = loss.value if isinstance(loss, js.Loss) else loss
    return mean.totals[0] / mean.weights[0]
