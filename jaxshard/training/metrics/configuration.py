"""Convert the configuration of a training run (flags, layout, mesh) to values for JSON, which are recorded once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxshard.core.layout import Layout


def describe(value: Any) -> Any:
    """Convert a configuration to values that JSON can represent.

    Args:
      value: dicts, sequences, dataclasses and named tuples, also nested. A `Layout` is converted to a dict of its mesh,
        its bytes per device and its printed summary, any other value that JSON can't represent to `str(value)`.
    """
    if isinstance(value, Layout):
        return _describe_layout(value)
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, Mapping):
        return {str(name): describe(one) for name, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return describe(value._asdict())
    if isinstance(value, list | tuple):
        return [describe(one) for one in value]
    return str(value)


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for every value in nested dicts, such as `("mesh.data", 8)`."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _describe_layout(layout: Layout) -> dict[str, Any]:
    return {
        "mesh": dict(layout.mesh.shape),
        "devices": f"{layout.mesh.size} x {layout.mesh.devices.flat[0].device_kind}",
        "bytes_per_device": {str(role): count for role, count in layout.bytes_per_device().items()},
        "summary": str(layout),
    }
