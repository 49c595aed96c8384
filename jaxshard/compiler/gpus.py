"""Describe GPUs to their compiler, so that programs compile without a GPU and without a driver.

The compiler is in the two wheels of JAX's CUDA plugin. It enforces no memory limit: a program that needs more than a
GPU has compiles too. cuDNN, if it is installed, chooses the attention kernels.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import jax

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


class Gpu(NamedTuple):
    """The properties of a GPU that its compiler needs.

    Attributes:
      kind: the `device_kind` that JAX shows.
      capability: the compute capability, major and minor.
      cores: the number of streaming multiprocessors.
      lanes: the number of f32 units of each multiprocessor.
      shared: the bytes of shared memory of each multiprocessor; a block may use 1 KiB less.
      l2: the bytes of the second-level cache.
      clock: the boost clock in GHz.
      memory: the bytes of device memory.
      bandwidth: the bytes per second between device memory and chip.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    lanes: int
    shared: int
    l2: int
    clock: float
    memory: int
    bandwidth: float


# NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM, and the white papers on their architectures (cores,
# lanes, caches, clocks). Shared memory by compute capability: CUDA C++ Programming Guide, "Technical Specifications".
GPUS = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 164 * 2**10, 40 * 2**20, 1.41, 80 * 2**30, 2.039e12),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228 * 2**10, 50 * 2**20, 1.98, 80 * 2**30, 3.35e12),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 228 * 2**10, 50 * 2**20, 1.98, 141 * 10**9, 4.8e12),
}
"""The GPUs for which a program can be compiled, by the names of `planned_mesh`."""


def check_gpu_compiler(version: str) -> None:
    """Raise an error if programs can't be compiled for a kind of GPU, such as "h100".

    Raises:
      ImportError: JAX's CUDA plugin, which holds the compiler, is not installed.
      ValueError: there is no description of these GPUs.
    """
    if version not in GPUS:
        raise ValueError(f"no GPU {version!r} to compile for; there are descriptions of {', '.join(GPUS)}")
    if not any(map(_is_installed, _PLUGINS)):
        wheels = f'"jax-cuda12-plugin=={jax.__version__}" "jax-cuda12-pjrt=={jax.__version__}"'
        raise ImportError(
            f"compiling for {version} needs the GPU compiler, and JAX's CUDA plugin is not installed; "
            f"pip install --no-deps {wheels} nvidia-cudnn-cu12 (no GPU is needed; nvidia-cudnn-cu12 is for attention "
            "alone)"
        )


def plugin_module() -> str:
    """Return the name of the module of JAX's CUDA plugin that is installed."""
    return next(filter(_is_installed, _PLUGINS))


def gpu_options(version: str, per_host: int, hosts: int) -> dict[str, str]:
    """Return the options for JAX's CUDA plugin that describe `hosts` hosts with `per_host` GPUs each."""
    return {"target_config": describe_target(GPUS[version]), "topology": f"1x{hosts}x{per_host}"}


def describe_target(gpu: Gpu) -> str:
    """Write XLA's target configuration of a GPU, the text form of its `GpuTargetConfigProto`."""
    major, minor = gpu.capability
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {gpu.cores}
          fpus_per_core: {gpu.lanes}
          clock_rate_ghz: {gpu.clock}
          shared_memory_per_core: {gpu.shared}
          shared_memory_per_block: {48 * 2**10}
          shared_memory_per_block_optin: {gpu.shared - 2**10}
          l2_cache_size: {gpu.l2}
          device_memory_size: {gpu.memory}
          memory_bandwidth: {int(gpu.bandwidth)}
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          registers_per_block_limit: 65536
          registers_per_core_limit: 65536
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: "{gpu.kind}"
    """


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # no plugin at all
        return False
