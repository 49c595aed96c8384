"""Limits of accelerator chips and their networks, from public sources, and the fraction that a training run uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

_GIB = 2**30


class Network(NamedTuple):
    """The links between devices: a torus (TPUs), or islands around a switch (GPUs), and a network outside.

    Attributes:
      inside: the name of the links within a torus ("ici") or an island ("nvlink", "xgmi").
      outside: the name of the network between slices of TPUs ("dcn") or islands of GPUs ("ib").
      bandwidth: bytes per second in one direction, of one link of the torus, or of a device to the switch of an island.
      dims: the number of dimensions of the torus; 0 for islands.
      closes_at: a dimension of the torus is a ring if its size is a multiple of this number; 0 if no dimension is.
      closes_together: True if either all dimensions are rings or none is, as in slices made of cubes.
      island: how many devices share a switch; 0 for a torus, which is as large as the slice.
      outside_bandwidth: bytes per second of one device in one direction.
      latency: seconds of a hop within the torus or island.
      outside_latency: seconds of a hop through the outer network.

    Example:
        network = js.plan.chip("TPU v5e").network
        network.closed((16, 16))    # (True, True): both dimensions are rings
    """

    inside: str
    outside: str
    bandwidth: float
    dims: int
    closes_at: int
    closes_together: bool
    island: int
    outside_bandwidth: float
    latency: float = 1e-6
    outside_latency: float = 1e-5

    def closed(self, torus: tuple[int, ...]) -> tuple[bool, ...]:
        """Return for each dimension of a slice of shape `torus` True if its links form a ring, with wrap-around.

        >>> chip("TPU v5e").network.closed((16, 8))
        (True, False)
        >>> chip("TPU v5p").network.closed((4, 4, 2))
        (False, False, False)
        """
        if not self.closes_at:
            return (False,) * len(torus)
        rings = tuple(size % self.closes_at == 0 for size in torus)
        return (all(rings),) * len(torus) if self.closes_together else rings


class Chip(NamedTuple):
    """Published limits of one JAX device.

    Attributes:
      name: the maker's name, such as "TPU v5e" or "H100 SXM".
      peak_flops: dense bf16 FLOPs per second with f32 accumulation, a multiply-add counted as two, without structured
        sparsity.
      hbm_bytes: bytes of memory, of which a compiler or driver keeps some for itself.
      hbm_bandwidth: bytes per second between memory and chip.
      usable_bytes: bytes of memory that a program may use: on TPUs the compiler's limit, on GPUs the share that JAX's
        allocator takes (`gpu_memory_fraction`).
      network: the network between such devices; None for chips without one (PCIe cards).
      peak_f32: FLOPs per second of f32 products as JAX computes them by default: one bf16 pass on TPUs, TF32 on GPUs of
        NVIDIA, f32 on those of AMD.
      exact_f32: FLOPs per second of f32 products on a GPU without TF32.
      peak_fp8: FLOPs per second of 8-bit floating products; None where the chip has none.
      peak_int8: operations per second of 8-bit integer products; None where the chip has none.
      mxu: the rows and columns of a TPU's matrix unit; 0 for GPUs.
      reached: the share of `peak_flops` that large bf16 products reach by public measurements.
      host_bandwidth: bytes per second between the chip and the memory of its host, in each direction.
      host_bytes: the host memory per chip; 0 if unknown.
    """

    name: str
    peak_flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    usable_bytes: int = 0
    network: Network | None = None
    peak_f32: float = 0.0
    exact_f32: float = 0.0
    peak_fp8: float | None = None
    peak_int8: float | None = None
    mxu: int = 0
    reached: float = 0.9
    host_bandwidth: float = 15e9
    host_bytes: int = 0

    def rate(self, dtype: str, passes: int = 1) -> float:
        """Return the FLOPs per second of products of a dtype.

        Args:
          dtype: the dtype of the operands, such as "bfloat16"; the larger one if they differ.
          passes: bf16 passes of an f32 product on a TPU: 1 by default, 3 at precision "high", 6 at "highest". On GPUs
            more than 1 means f32 without TF32.

        Example:
          >>> chip("TPU v6e").rate("int8") / 1e12
          1836.0
          >>> round(chip("TPU v5e").rate("float32", passes=6) / 1e12, 1)
          32.8
        """
        if dtype.startswith("float8"):
            return self.peak_fp8 or self.peak_flops
        if dtype in ("int8", "uint8"):
            return self.peak_int8 or self.peak_flops
        if dtype in ("float32", "float64", "complex64"):
            exact = passes > 1 and not self.mxu
            return self.exact_f32 if exact else self.peak_f32 / passes
        return self.peak_flops

    def part(self, share: float) -> Chip:
        """Return the limits of a `share` of the chip, such as 0.5 for one of two cores that share memory and links."""
        if share == 1:
            return self
        network = self.network and self.network._replace(
            bandwidth=self.network.bandwidth * share, outside_bandwidth=self.network.outside_bandwidth * share
        )
        return self._replace(
            peak_flops=self.peak_flops * share,
            hbm_bytes=int(self.hbm_bytes * share),
            hbm_bandwidth=self.hbm_bandwidth * share,
            usable_bytes=int(self.usable_bytes * share),
            network=network,
            peak_f32=self.peak_f32 * share,
            exact_f32=self.exact_f32 * share,
            peak_fp8=self.peak_fp8 and self.peak_fp8 * share,
            peak_int8=self.peak_int8 and self.peak_int8 * share,
            host_bandwidth=self.host_bandwidth * share,
            host_bytes=int(self.host_bytes * share),
        )


def chip(device_kind: str, *, num_cores: int | None = None) -> Chip | None:
    """Look up a chip by the kind of its devices, or by its short name.

    The figures are those of one JAX device. On TPU v2, v3 and TPU7x that is half a chip (one of its two cores); on v4
    and v5p a full chip, unless the runtime shows its cores as separate devices, as the v4 topologies do.

    Args:
      device_kind: what `jax.Device.device_kind` says; or the name that topologies begin with, such as "v5e" or "h100".
      num_cores: `device.num_cores` of a TPU, if cores are separate devices; by default the usual number.

    Returns:
      The limits of one device, or None for a kind that is not in the table: nothing is guessed.

    Raises:
      ValueError: the variable that says how much of a GPU's memory JAX takes is not a fraction.

    Example:
      >>> chip("TPU v5 lite").peak_flops
      197000000000000.0
      >>> chip("h100").name
      'H100 SXM'
      >>> chip("cpu") is None
      True
    """
    kind = KINDS.get(device_kind.lower(), device_kind)
    if kind in _GPUS:
        gpu = _GPUS[kind]
        return gpu._replace(usable_bytes=int(gpu.hbm_bytes * gpu_memory_fraction(os.environ)))
    found = _TPUS.get(kind)
    if found is None:
        return None
    whole, cores, shown = found
    together = shown if num_cores is None else num_cores
    return whole.part(together / cores)


def gpu_memory_fraction(environ: Mapping[str, str]) -> float:
    """Return the fraction of a GPU's memory that JAX's allocator takes, whether it preallocates or not.

    Args:
      environ: environment variables. XLA_CLIENT_MEM_FRACTION, or XLA_PYTHON_CLIENT_MEM_FRACTION as older versions call
        it, sets the fraction; with XLA_PYTHON_CLIENT_ALLOCATOR=platform there is no limit.

    Raises:
      ValueError: the value is not above 0 and at most 1.

    Example:
      >>> gpu_memory_fraction({}), gpu_memory_fraction({"XLA_CLIENT_MEM_FRACTION": "0.9"})
      (0.75, 0.9)
    """
    if environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return 1.0
    name = next(filter(environ.get, ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")), None)
    if name is None:
        return 0.75
    try:
        fraction = float(environ[name])
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ValueError(f"{name}={environ[name]} is no fraction of a GPU's memory; set it to 0.75, or unset it")
    return fraction


def is_tpu(device_kind: str) -> bool:
    """Return True for the `device_kind` of a TPU that `chip` knows.

    Args:
      device_kind: what `jax.Device.device_kind` says.

    Example:
      >>> is_tpu("TPU v5 lite"), is_tpu("NVIDIA H100 80GB HBM3")
      (True, False)
    """
    return device_kind in _TPUS


def has_sparse_cores(device_kind: str) -> bool:
    """Return True for TPUs with SparseCores, which can run collectives: v4 and later, but not v5e.

    Args:
      device_kind: what `jax.Device.device_kind` says.

    Example:
      >>> has_sparse_cores("TPU v5p"), has_sparse_cores("TPU v5 lite"), has_sparse_cores("cpu")
      (True, False, False)
    """
    return is_tpu(device_kind) and device_kind not in _WITHOUT_SPARSE_CORES


def mfu(flops_per_second: float, device_kind: str, devices: int, *, num_cores: int | None = None) -> float | None:
    """Compute the model FLOPs utilization: the fraction of the devices' bf16 peak that the model's own FLOPs use.

    Source: Chowdhery et al. 2022, "PaLM", appendix B.

    Args:
      flops_per_second: model FLOPs (`train_flops`) per second of all devices together.
      device_kind: what `jax.Device.device_kind` says.
      devices: the number of devices.
      num_cores: `device.num_cores` of a TPU, as in `chip`.

    Returns:
      A number between 0 and 1, or None for a chip that is not in the table.

    Example:
      >>> mfu(98.5e12, "TPU v5e", 1)
      0.5
    """
    known = chip(device_kind, num_cores=num_cores)
    return None if known is None else flops_per_second / (known.peak_flops * devices)


KINDS = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
    "a10": "NVIDIA A10",
    "a100": "NVIDIA A100-SXM4-80GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "b200": "NVIDIA B200",
    "gb200": "NVIDIA GB200",
    "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "l4": "NVIDIA L4",
    "l40s": "NVIDIA L40S",
    "mi300x": "AMD Instinct MI300X",
}
"""{short name of a chip, with which names of topologies begin: its `jax.Device.device_kind`}."""


# Networks of TPUs. Bytes per second of one link and direction are Google's "bidirectional inter-chip interconnect
# bandwidth per chip" (cloud.google.com/tpu/docs/v5e: 400 GB/s, /v5p: 1200, /v6e: 3200 Gbps each way, /tpu7x: 1200, /v4:
# 2400 Gbps each way) over both directions and the ports: 4 of a two-dimensional torus, 6 of a three-dimensional one.
# Which dimensions are rings: jax-ml.github.io/scaling-book/tpus ("a full 16 axis" on v5e and v6e, multiples of 4 on
# others), and what libtpu's topologies accept. A hop takes about 1 microsecond: the same book, /sharding.
# Outside: v5e 6.4 Tbps and v6e 25.6 Tbps for a pod of 256 chips, v5p and v4 50 Gbps a chip, TPU7x 100 Gbps a chip.
def _torus(link: float, dims: int, outside: float) -> Network:
    flat = dims == 2
    return Network("ici", "dcn", link, dims, 16 if flat else 4, not flat, 0, outside)


def _tpu(
    name: str,
    peak: float,
    gibibytes: int,
    bandwidth: float,
    usable: float,
    network: Network | None,
    *,
    fp8: float | None = None,
    int8: float | None = None,
    mxu: int = 128,
    reached: float = 0.9,
    link: float = 15e9,
    host: float = 0,
) -> Chip:
    """Make the `Chip` of a TPU. By default JAX computes f32 products there in one bf16 pass, at the bf16 rate."""
    memory, own, beside = gibibytes * _GIB, int(usable * _GIB), int(host * _GIB)
    return Chip(name, peak, memory, bandwidth, own, network, peak, 0.0, fp8, int8, mxu, reached, link, beside)


# device_kind: (the whole chip, its cores, how many of these JAX shows as one device by default).
# Google's tables per chip: cloud.google.com/tpu/docs/v2, /v3, /v4, /v5e, /v5p, /v6e and /tpu7x. The spellings and cores
# were read from libtpu's topologies ("TPU v5" is v5p, "lite" marks v5e and v6e), and so was the memory that a program
# may use, in GiB: libtpu refuses what needs more ("exceeds available HBM (15.75G)"; 0.0.34 to 0.0.52). For cores shown
# apart that is each core's, here added up. v5p lists FP8 at the rate of bf16, and int8 at twice that.
# Large products reach 827 of 918 TFLOP/s on v6e and 956 of 1153.5 on a core of TPU7x (AI-Hypercomputer/tpu-recipes,
# microbenchmarks/README.md and microbenchmarks/ironwood/README.md); the others are given v6e's share.
# Links to a host: 16 GB/s each way on v4, 32 on v6e, "typically around 1.5e10" (jax-ml.github.io/scaling-book/tpus).
# Memory of a host: 512 GiB for 8 chips of v5e, 1536 for 8 of v6e, 448 GB for 4 of v5p, 960 GB for 4 of TPU7x (Google's
# pages of each).
_V5E = (
    _tpu("TPU v5e", 197e12, 16, 819e9, 15.75, _torus(50e9, 2, 3.125e9), int8=393e12, host=64),
    1,
    1,
)
_V5P = (
    _tpu("TPU v5p", 459e12, 95, 2765e9, 95.74, _torus(100e9, 3, 6.25e9), fp8=459e12, int8=918e12, host=104),
    2,
    2,
)
_V6E = (
    _tpu("TPU v6e", 918e12, 32, 1640e9, 31.25, _torus(100e9, 2, 12.5e9), int8=1836e12, mxu=256, link=32e9, host=192),
    1,
    1,
)
_WITHOUT_SPARSE_CORES = ("TPU v2", "TPU v3", "TPU v5 lite", "TPU v5e")
_TPUS: dict[str, tuple[Chip, int, int]] = {
    "TPU v2": (_tpu("TPU v2", 46e12, 16, 700e9, 14.96, None), 2, 1),
    "TPU v3": (_tpu("TPU v3", 123e12, 32, 900e9, 30.96, None), 2, 1),
    "TPU v4": (_tpu("TPU v4", 275e12, 32, 1200e9, 30.5, _torus(50e9, 3, 6.25e9), int8=275e12, link=16e9), 2, 2),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": (
        _tpu(
            "TPU7x", 2307e12, 192, 7380e9, 189.5, _torus(100e9, 3, 12.5e9), fp8=4614e12, mxu=256, reached=0.83, host=223
        ),
        2,
        1,
    ),
}


# Islands of GPUs: NVLink's figure on a data sheet counts both directions (A100 600 GB/s, H100 and H200 900, B200 1800),
# and so does AMD's for the seven Infinity Fabric links from a GPU to the seven others (MI300X 896, MI355X 1075).
# Outside, the network adapters of NVIDIA's DGX reference designs: one of 200 Gb/s for a GPU of a DGX A100, one of 400
# Gb/s for one of a DGX H100, H200 or B200; one of 400 Gb/s for an MI300X in Azure's machines. Latencies: NCCL's
# tuning model (src/graph/tuning.cc), 0.6 microseconds for a hop of its LL ring through NVLink, 14 through the network;
# AMD's library is made from the same source.
def _island(both_directions: float, outside: float, island: int = 8, inside: str = "nvlink") -> Network:
    return Network(inside, "ib", both_directions / 2, 0, 0, False, island, outside, 6e-7, 1.4e-5)


_A100 = _island(600e9, 25e9)
_H100 = _island(900e9, 50e9)
_B200 = _island(1800e9, 50e9)
_MI300X = _island(896e9, 50e9, inside="xgmi")


def _gpu(
    name: str,
    peak: float,
    gigabytes: int,
    bandwidth: float,
    network: Network | None,
    *,
    fp8: bool = False,
    int8: bool = True,
    reached: float = 0.8,
    link: float = 32e9,
    f32: float = 0.0,
) -> Chip:
    """Make the `Chip` of a GPU: its 8-bit products run at twice the rate of bf16 ones, its TF32 products at half.

    `chip` sets the bytes that a program may use.

    Args:
      f32: the rate of f32 products on GPUs where JAX does not use TF32. On others, exact f32 products run at an eighth
        of the rate of TF32, as on A100 (19.5 of 156 TFLOPs) and H100 (67 of 495).
    """
    memory = gigabytes * 10**9
    twice = 2 * peak
    narrow = (twice if fp8 else None, twice if int8 else None)
    default, exact = f32 or peak / 2, f32 or peak / 16
    return Chip(name, peak, memory, bandwidth, memory, network, default, exact, *narrow, 0, reached, link)


# NVIDIA's data sheets by product: A10, A100, H100, H200, L4, L40S, DGX B200, GB200 NVL72. From Hopper on they print the
# rate with 2:4 sparsity; the dense rate below is half of it. Memory is in decimal gigabytes, as sold, but for H100 SXM,
# whose driver tells 85.0 GB (JAX then takes 63.8 GB by default, as measured by benchmarks/gpu.py). Large products
# reach 268 of 312 TFLOP/s on A100, 792 of 989 on H100 and 1745 of 2250 on B200 (stas00/ml-engineering, compute/
# accelerator, "maximum achievable matmul FLOPS"); the others are given H100's share. Links to a host, each way: 32 GB/s
# of PCIe 4, 64 of PCIe 5, and for each GPU of a GB200 half of the 450 GB/s of its NVLink-C2C.
#
# AMD's data sheets of MI300X and MI325X, which compute at the same rates. Their memory is sold in binary gigabytes: the
# driver of a "192 GB" MI300X tells 196288 MiB. `device_kind` is the product's name (jax-ml/jax, pull request 37634).
# XLA computes f32 products there in f32 (stream_executor/rocm/hip_blas_utils.cc), not in TF32. Large products reach 668
# and 785 TFLOP/s (the same table of ml-engineering).
_GPUS: dict[str, Chip] = {
    "NVIDIA A10": _gpu("A10", 125e12, 24, 600e9, None),
    "NVIDIA A100-PCIE-40GB": _gpu("A100 PCIe 40GB", 312e12, 40, 1555e9, None),
    "NVIDIA A100-SXM4-40GB": _gpu("A100 SXM 40GB", 312e12, 40, 1555e9, _A100, reached=0.86),
    "NVIDIA A100 80GB PCIe": _gpu("A100 PCIe 80GB", 312e12, 80, 1935e9, None),
    "NVIDIA A100-SXM4-80GB": _gpu("A100 SXM 80GB", 312e12, 80, 2039e9, _A100, reached=0.86),
    "NVIDIA H100 PCIe": _gpu("H100 PCIe", 756e12, 80, 2000e9, None, fp8=True, link=64e9),
    "NVIDIA H100 NVL": _gpu("H100 NVL", 835e12, 94, 3900e9, None, fp8=True, link=64e9),
    "NVIDIA H100 80GB HBM3": _gpu("H100 SXM", 989e12, 85, 3350e9, _H100, fp8=True, link=64e9),
    "NVIDIA H200": _gpu("H200 SXM", 989e12, 141, 4800e9, _H100, fp8=True, link=64e9),
    "NVIDIA H200 NVL": _gpu("H200 NVL", 835e12, 141, 4800e9, None, fp8=True, link=64e9),
    "NVIDIA B200": _gpu("B200", 2250e12, 180, 8000e9, _B200, fp8=True, reached=0.78, link=64e9),
    "NVIDIA GB200": _gpu("GB200", 2500e12, 186, 8000e9, _island(1800e9, 50e9, 72), fp8=True, reached=0.78, link=225e9),
    "NVIDIA L4": _gpu("L4", 121e12, 24, 300e9, None, fp8=True),
    "NVIDIA L40S": _gpu("L40S", 362e12, 48, 864e9, None, fp8=True),
    "AMD Instinct MI300X": _gpu(
        "MI300X", 1307.4e12, 205, 5300e9, _MI300X, fp8=True, reached=0.51, link=64e9, f32=163.4e12
    ),
    "AMD Instinct MI325X": _gpu(
        "MI325X", 1307.4e12, 274, 6000e9, _MI300X, fp8=True, reached=0.60, link=64e9, f32=163.4e12
    ),
}
