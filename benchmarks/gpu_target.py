"""A mesh of GPUs that are not here, for which XLA's GPU compiler compiles anyway.

Needs `jax-cuda12-plugin` and `jax-cuda12-pjrt`, which install without a GPU and without CUDA's libraries:

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt

The compiler is told of the GPU by a description. Memory is not among what it enforces, and nothing is tuned by running.
"""

from __future__ import annotations

from typing import Any

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""What NVIDIA publishes of an H100 SXM, in the words of XLA's `GpuTargetConfigProto`."""


def gpu_mesh(name: str, /, **axes: int) -> Any:
    """A mesh over hosts of GPUs: "h100:8" is one of 8, "h100:8x32" are 32 of them."""
    from jax.experimental import topologies

    import jaxshard as js

    _, _, shape = name.partition(":")
    per_host, _, hosts = shape.partition("x")
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology=f"1x{hosts or 1}x{per_host}")
    return js.make_mesh(list(topology.devices), **axes)
