"""Which devices a command runs on: accelerators where there are any, else simulated CPU devices."""

from __future__ import annotations

import os

import jax

from jaxshard._compat import backend_is_initialized, default_devices

SIMULATED = 8
"""How many CPU devices are simulated when no number is asked for."""


def choose_devices(count: int | None) -> list[jax.Device]:
    """The first `count` devices of the default backend, or all of them; must run before anything touches a device.

    Without an accelerator, and where JAX_PLATFORMS asks for one that is not there, the CPU appears as `count` devices,
    else as many as JAX_NUM_CPU_DEVICES or XLA_FLAGS say, else eight.

    Raises:
      ValueError: a count below 1, or more than there are.
    """
    if count is not None and count < 1:
        raise ValueError(f"--devices must be at least 1, got {count}")
    if not backend_is_initialized() and (count is not None or not _is_simulated()):
        jax.config.update("jax_num_cpu_devices", count or SIMULATED)
    found = default_devices()
    if found is None:
        jax.config.update("jax_platforms", "cpu")
        found = jax.devices()
    if count is not None and count > len(found):
        raise ValueError(
            f"--devices {count}: there are {len(found)} {found[0].platform} device(s); ask for at most {len(found)}, "
            "or set JAX_PLATFORMS=cpu to simulate them"
        )
    return found[:count]


def describe(devices: list[jax.Device]) -> str:
    """What they are: "8 simulated CPU devices", "4 x NVIDIA H100 80GB HBM3"."""
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    return "1 CPU device" if len(devices) == 1 else f"{len(devices)} simulated CPU devices"


def _is_simulated() -> bool:
    """Whether the number of CPU devices was set, by JAX's own configuration or by XLA's flag."""
    flagged = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return flagged or getattr(jax.config, "jax_num_cpu_devices", -1) > 0
