"""Type aliases for signatures."""

from collections.abc import Callable
from typing import Any, Literal

PyTree = Any
AxisName = str | tuple[str, ...]
"""A mesh axis, or several that split one dimension together, the first one major."""

Role = Literal["param", "grad", "opt", "state", "batch"]
ROLES: tuple[Role, ...] = ("param", "grad", "opt", "state", "batch")
"""The five kinds of arrays in a training step, which a strategy places."""

InitFn = Callable[..., PyTree]
"""`init_fn(key) -> params | js.Model(params, state)`."""

LossFn = Callable[..., Any]
"""`loss_fn(model, batch, key) -> scalar | js.Mean | js.Loss`."""
