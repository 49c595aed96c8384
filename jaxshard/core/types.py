"""Names for the types that signatures share."""

from collections.abc import Callable
from typing import Any, Literal

PyTree = Any
AxisName = str | tuple[str, ...]
Role = Literal["param", "grad", "opt", "state", "batch"]
ROLES: tuple[Role, ...] = ("param", "grad", "opt", "state", "batch")

InitFn = Callable[..., PyTree]
LossFn = Callable[..., Any]
