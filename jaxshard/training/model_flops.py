"""Count the model FLOPs of a training step from abstract traces of its loss."""

from __future__ import annotations

from typing import Any

import jax

from jaxshard.core.layout import Layout, join_model, put_back, select
from jaxshard.core.loss import Mean, as_loss
from jaxshard.core.types import LossFn, PyTree
from jaxshard.cost.flops import model_flops, train_flops


def step_flops(loss_fn: LossFn, layout: Layout, batch: PyTree) -> int:
    """Count the model FLOPs of a step over all devices, by convention three times those of the forward pass.

    Where parameters are frozen, the products for their gradients are left out: the gradient is traced, too, and the
    smaller count is taken. (The trace of a gradient with remat has recomputed products, which are no model FLOPs.)

    Args:
      loss_fn: as for `js.make_step`.
      layout: tells the shapes of the parameters and which are trained.
      batch: the shapes of a global batch.

    Raises:
      ValueError: as `model_flops`; and whatever the loss raises for a global batch.
    """
    shapes = layout.shapes
    flops = train_flops(loss_fn, join_model(shapes.params, shapes.state), batch, shapes.key)
    if all(jax.tree.leaves(layout.trainable)):
        return flops

    def gradient(params: PyTree, state: PyTree, batch: PyTree, key: Any) -> PyTree:
        def loss(trained: PyTree) -> Any:
            model = join_model(put_back(layout.trainable, trained, params), state)
            value: Any = as_loss(loss_fn(model, batch, key)).value
            return value.value if isinstance(value, Mean) else value

        return jax.grad(loss)(select(layout.trainable, params))

    return min(flops, model_flops(gradient, shapes.params, shapes.state, batch, shapes.key))
