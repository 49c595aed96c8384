"""Choose the devices of a command: accelerators if there are any, otherwise simulated CPU devices."""

from __future__ import annotations

import os

import jax

from jaxshard.core.compat import backend_is_initialized, default_devices, process_count_and_id

SIMULATED = 8
"""The number of simulated CPU devices if no number is asked for."""
MOST_SIMULATED = 4096
"""The most in one process: the CPU runtime makes threads and memory for each."""


def choose_devices(count: int | None, mesh_size: int | None = None) -> list[jax.Device]:
    """Choose devices of the default backend; call it before JAX starts a backend.

    Without an accelerator, CPU devices are simulated, also if JAX_PLATFORMS names an accelerator that is absent. Their
    number is `count`, else `mesh_size`, else the number in JAX_NUM_CPU_DEVICES or XLA_FLAGS, else eight. `count`,
    `mesh_size` and eight are numbers over all processes, each of which gets an equal share; the number in the
    environment is for each process.

    Args:
      count: the number of devices over all processes; None for all accelerators.
      mesh_size: the number of devices that the mesh needs, if all its sizes are given.

    Raises:
      ValueError: there are fewer devices than `count`, or the number is not a multiple of the number of processes.
    """
    processes, wanted = process_count_and_id()[0], count or mesh_size
    named = f"--devices {count}" if count else f"{wanted or SIMULATED} simulated CPU devices"
    is_simulated_anew = not backend_is_initialized() and (wanted is not None or not _is_simulated())
    if is_simulated_anew:
        each = (wanted or SIMULATED) // processes
        if each > MOST_SIMULATED:
            raise ValueError(f"{named}: at most {MOST_SIMULATED} devices can be simulated in a process")
        jax.config.update("jax_num_cpu_devices", max(1, each))
    found = default_devices()
    if found is None:
        jax.config.update("jax_platforms", "cpu")
        found = jax.devices()
    platform = found[0].platform
    if count is None and platform != "cpu":
        return found
    if (wanted or (SIMULATED if is_simulated_anew else 0)) % processes:
        raise ValueError(
            f"{named} can't be divided over {processes} processes; give --devices a multiple of {processes}"
        )
    if wanted is None:
        return found
    if wanted > len(found):
        raise ValueError(
            f"{named}: there are {len(found)} {platform} device(s); ask for at most {len(found)}, or set "
            "JAX_PLATFORMS=cpu to simulate them"
        )
    of_each = [[one for one in found if one.process_index == process] for process in range(processes)]
    chosen = [one for own in of_each for one in own[: wanted // processes]]
    if len(chosen) < wanted:
        raise ValueError(f"{named}: not each of {processes} processes has {wanted // processes} of them")
    return chosen


def describe(devices: list[jax.Device]) -> str:
    """Describe devices in words: "8 simulated CPU devices", or "16 x NVIDIA H100 80GB HBM3 in 2 processes"."""
    processes = len({device.process_index for device in devices})
    where = f" in {processes} processes" if processes > 1 else ""
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}{where}"
    return "1 CPU device" if len(devices) == 1 else f"{len(devices)} simulated CPU devices{where}"


def _is_simulated() -> bool:
    """Return True if `jax_num_cpu_devices` or a flag in XLA_FLAGS already sets the number of CPU devices."""
    flagged = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    return flagged or getattr(jax.config, "jax_num_cpu_devices", -1) > 0
