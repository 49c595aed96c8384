"""Names for the types that signatures share."""

from collections.abc import Callable
from typing import Any, Literal

PyTree = Any
AxisName = str | tuple[str, ...]
"""A mesh axis, or several that split one dimension together, the first one major."""

Role = Literal["param", "grad", "opt", "state", "batch"]
ROLES: tuple[Role, ...] = ("param", "grad", "opt", "state", "batch")
"""The five kinds of array in a training step. A strategy says where each of them lives."""

InitFn = Callable[..., PyTree]
"""`init_fn(key) -> params | js.Model(params, state)`."""

LossFn = Callable[..., Any]
"""`loss_fn(model, batch, key) -> scalar | js.Mean | js.Loss`."""
