"""Which devices a command runs on: accelerators where there are any, else simulated CPU devices."""

from __future__ import annotations

import os

import jax

from jaxshard.core.compat import backend_is_initialized, default_devices, process_count_and_id

SIMULATED = 8
"""The number of simulated CPU devices where none is asked for."""
MOST_SIMULATED = 4096
"""More in one process are refused: the runtime of the CPU makes threads and memory for each."""


def choose_devices(count: int | None) -> list[jax.Device]:
    """Choose devices of the default backend; call it before anything touches a device.

    Without an accelerator, and where JAX_PLATFORMS asks for one that is not there, CPU devices are simulated: `count`
    of them, else as many as JAX_NUM_CPU_DEVICES or XLA_FLAGS say, else eight. Several processes share `count`, or the
    eight, equally: each gives its own first devices. What the environment says holds for each process.

    Args:
      count: how many devices, over all processes; None for all there are.

    Raises:
      ValueError: a count above what is there, or that the processes do not divide.
    """
    processes = process_count_and_id()[0]
    if count is not None and count // processes > MOST_SIMULATED and not backend_is_initialized():
        raise ValueError(f"--devices {count}: at most {MOST_SIMULATED} devices can be simulated in a process")
    if count is not None and count % processes:
        raise ValueError(_indivisible(f"--devices {count}", processes))
    eight = count is None and not backend_is_initialized() and not _is_simulated()
    if not backend_is_initialized() and (count is not None or eight):
        jax.config.update("jax_num_cpu_devices", max(1, (count or SIMULATED) // processes))
    found = default_devices()
    if found is None:
        jax.config.update("jax_platforms", "cpu")
        found = jax.devices()
    if eight and SIMULATED % processes and found[0].platform == "cpu":
        raise ValueError(_indivisible(f"{SIMULATED} simulated CPU devices", processes))
    if count is None:
        return found
    if count > len(found):
        raise ValueError(
            f"--devices {count}: there are {len(found)} {found[0].platform} device(s); ask for at most {len(found)}, "
            "or set JAX_PLATFORMS=cpu to simulate them"
        )
    chosen: list[jax.Device] = []
    for process in range(processes):
        chosen += [device for device in found if device.process_index == process][: count // processes]
    if len(chosen) < count:
        raise ValueError(f"--devices {count}: not each of {processes} processes has {count // processes} of them")
    return chosen


def describe(devices: list[jax.Device]) -> str:
    """Describe devices, such as "8 simulated CPU devices" or "16 x NVIDIA H100 80GB HBM3 in 2 processes"."""
    processes = len({device.process_index for device in devices})
    where = f" in {processes} processes" if processes > 1 else ""
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}{where}"
    return "1 CPU device" if len(devices) == 1 else f"{len(devices)} simulated CPU devices{where}"


def _indivisible(what: str, processes: int) -> str:
    return f"{what} can't be divided over {processes} processes; give --devices a multiple of {processes}"


def _is_simulated() -> bool:
    """True if the number of CPU devices was set, by JAX's own configuration or by XLA's flag."""
    flagged = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return flagged or getattr(jax.config, "jax_num_cpu_devices", -1) > 0
