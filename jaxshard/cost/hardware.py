"""Limits of accelerator chips, from their makers' data sheets, and the share of them that a run uses."""

from __future__ import annotations

from typing import NamedTuple

_GIB = 2**30


class Chip(NamedTuple):
    """Published limits of what JAX calls one device.

    Attributes:
      name: the maker's name, such as "TPU v5e" or "H100 SXM".
      peak_flops: dense bf16 FLOPs per second with f32 accumulation, a multiply-add counted as two, without structured
        sparsity.
      hbm_bytes: bytes of memory, of which a compiler or driver keeps some for itself.
      hbm_bandwidth: bytes per second between memory and chip.
    """

    name: str
    peak_flops: float
    hbm_bytes: int
    hbm_bandwidth: float


def chip(device_kind: str, *, num_cores: int | None = None) -> Chip | None:
    """Look up the chip behind a device's kind.

    The figures are those of one JAX device. On TPU v2, v3 and TPU7x that is half a chip (one of its two cores); on v4
    and v5p the whole chip, unless the runtime was told to show its cores apart, as the v4 topologies do.

    Args:
      device_kind: what `jax.Device.device_kind` says.
      num_cores: `device.num_cores` of a TPU, to be exact where cores are shown apart; by default what is usual.

    Returns:
      The limits of one device, or None for a kind that is not in the table: nothing is guessed.

    Example:
      >>> chip("TPU v5 lite").peak_flops
      197000000000000.0
      >>> chip("cpu") is None
      True
    """
    if device_kind in _GPUS:
        return _GPUS[device_kind]
    found = _TPUS.get(device_kind)
    if found is None:
        return None
    whole, cores, shown = found
    share = (shown if num_cores is None else num_cores) / cores
    return Chip(whole.name, whole.peak_flops * share, int(whole.hbm_bytes * share), whole.hbm_bandwidth * share)


def mfu(flops_per_second: float, device_kind: str, devices: int, *, num_cores: int | None = None) -> float | None:
    """Compute the model FLOPs utilization: the share of the devices' bf16 peak that does the model's own work.

    Source: Chowdhery et al. 2022, "PaLM", appendix B.

    Args:
      flops_per_second: model FLOPs (`train_flops`) per second of all devices together.
      device_kind: what `jax.Device.device_kind` says.
      devices: how many of them there are.
      num_cores: `device.num_cores` of a TPU, as in `chip`.

    Returns:
      A number between 0 and 1, or None for a chip that is not in the table.

    Example:
      >>> mfu(98.5e12, "TPU v5e", 1)
      0.5
    """
    known = chip(device_kind, num_cores=num_cores)
    return None if known is None else flops_per_second / (known.peak_flops * devices)


# device_kind: (the whole chip, its cores, how many of these JAX shows as one device by default).
# Google's tables per chip: cloud.google.com/tpu/docs/v2, /v3, /v4, /v5e, /v5p, /v6e and /tpu7x. The spellings and cores
# were read from libtpu's topologies ("TPU v5" is v5p, "lite" marks v5e and v6e).
_V5E = (Chip("TPU v5e", 197e12, 16 * _GIB, 819e9), 1, 1)
_V5P = (Chip("TPU v5p", 459e12, 95 * _GIB, 2765e9), 2, 2)
_V6E = (Chip("TPU v6e", 918e12, 32 * _GIB, 1640e9), 1, 1)
_TPUS: dict[str, tuple[Chip, int, int]] = {
    "TPU v2": (Chip("TPU v2", 46e12, 16 * _GIB, 700e9), 2, 1),
    "TPU v3": (Chip("TPU v3", 123e12, 32 * _GIB, 900e9), 2, 1),
    "TPU v4": (Chip("TPU v4", 275e12, 32 * _GIB, 1200e9), 2, 2),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": (Chip("TPU7x", 2307e12, 192 * _GIB, 7380e9), 2, 1),
}

# NVIDIA's data sheets by product: A10, A100, H100, H200, L4, L40S, DGX B200, GB200 NVL72. From Hopper on they print the
# rate with 2:4 sparsity; the dense rate below is half of it. Memory is in decimal gigabytes, as sold.
_GPUS: dict[str, Chip] = {
    "NVIDIA A10": Chip("A10", 125e12, 24 * 10**9, 600e9),
    "NVIDIA A100-PCIE-40GB": Chip("A100 PCIe 40GB", 312e12, 40 * 10**9, 1555e9),
    "NVIDIA A100-SXM4-40GB": Chip("A100 SXM 40GB", 312e12, 40 * 10**9, 1555e9),
    "NVIDIA A100 80GB PCIe": Chip("A100 PCIe 80GB", 312e12, 80 * 10**9, 1935e9),
    "NVIDIA A100-SXM4-80GB": Chip("A100 SXM 80GB", 312e12, 80 * 10**9, 2039e9),
    "NVIDIA H100 PCIe": Chip("H100 PCIe", 756e12, 80 * 10**9, 2000e9),
    "NVIDIA H100 NVL": Chip("H100 NVL", 835e12, 94 * 10**9, 3900e9),
    "NVIDIA H100 80GB HBM3": Chip("H100 SXM", 989e12, 80 * 10**9, 3350e9),
    "NVIDIA H200": Chip("H200 SXM", 989e12, 141 * 10**9, 4800e9),
    "NVIDIA H200 NVL": Chip("H200 NVL", 835e12, 141 * 10**9, 4800e9),
    "NVIDIA B200": Chip("B200", 2250e12, 180 * 10**9, 8000e9),
    "NVIDIA GB200": Chip("GB200", 2500e12, 186 * 10**9, 8000e9),
    "NVIDIA L4": Chip("L4", 121e12, 24 * 10**9, 300e9),
    "NVIDIA L40S": Chip("L40S", 362e12, 48 * 10**9, 864e9),
}
