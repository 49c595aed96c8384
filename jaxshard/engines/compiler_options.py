"""Compiler options of a step: those that overlap collectives with matrix products on each chip, and the user's own.

They are passed with the program (`jax.jit(compiler_options=...)`), never by the environment, where they would change
other programs too. Their names are XLA's and undocumented. A compiler refuses a name that it does not know, loudly: "No
such compile option: 'xla_...'".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh

Options = Mapping[str, bool | int | float | str | None]
"""Names of the compiler's options, `xla_` included, and their values; None is the compiler's default."""

_FUSION = "xla_tpu_enable_async_collective_fusion"
_SPARSE_CORE = "xla_tpu_enable_sparse_core_collective_offload"

# SparseCores are small processors that can run collectives while the TensorCore computes. TPU7x uses them by itself.
_SUMS_ON_SPARSE_CORES: dict[str, Any] = {
    f"{_SPARSE_CORE}_all_reduce": True,
    f"{_SPARSE_CORE}_reduce_scatter": True,
}
_GATHERS_ON_SPARSE_CORES: dict[str, Any] = {f"{_SPARSE_CORE}_all_gather": True}

# "Collective matmul": matrix products in pieces, while permutes send or receive other pieces. The partitioner makes
# them of products over `tensor` by itself; these options make them also of the gathers that it leaves. For a Llama 3
# 70B over data=64, tensor=8 of v5p:8x8x8 (explicit, libtpu 0.0.52), GB of exposed collectives and of temporaries:
# without any 131.7 and 3.47, only the partitioner's 82.0 and 3.29, with these too 37.6 and 3.31, without unrolling 38.9
# and 3.36. Reductions too (`xla_tpu_decompose_einsum_reduce_scatter`): 37.6, but 3.60. Without `tensor` they change
# nothing. v5e keeps the compiler's default, since the best choice depends on the ring: over 16 chips, which form a
# closed ring, the partitioner's leave 0.82 GB exposed instead of 1.16 (two blocks of 8B), over 8 chips, which do not,
# 1.59 instead of 1.12, for 8 % more cycles. There a large `xla_jf_spmd_threshold_for_windowed_einsum_mib` turns them
# off.
_GATHERS_BESIDE_PRODUCTS: dict[str, Any] = {
    "xla_tpu_decompose_all_gather_einsum": True,
    "xla_tpu_decompose_all_gather_with_multiple_einsums": False,
    "xla_tpu_spmd_unroll_windowed_einsum": True,
}

# Measured on three blocks of a Llama-2 7B with a flash kernel, 1 x 4096 tokens per chip, gradients reduced in bf16 (JAX
# 0.12.0.1, libtpu 0.0.50, no hardware): bytes of exposed collectives, and temporaries of a step.
# "TPU v4" is not here: nothing was found that changes its program. TPU7x offloads to SparseCores by itself.
OVERLAP: dict[str, dict[str, Any]] = {
    # fsdp over 16 of v5e:4x4: 2.46 to 1.38 GB, temporaries 1.84 to 1.79 GB. Gathers already overlap with products;
    # these also overlap all-reduces, gathers with elementwise operations, and both with Pallas kernels.
    "TPU v5 lite": {
        "xla_enable_async_all_reduce": True,
        f"{_FUSION}_fuse_all_reduce": True,
        f"{_FUSION}_fuse_kloop_fusions": True,
        f"{_FUSION}_with_mosaic_custom_call": True,
    },
    # With gathers on SparseCores as well: fsdp over 64 of v5p:4x4x4 4.69 to 0 GB, temporaries 1.61 to 1.55 GB; over
    # 4 x 4 x 4 5.51 to 0.03, 1.58 to 1.55. They are not set, since more gathered weights are held at once: temporaries
    # of a Llama 3 70B over data=64, tensor=8 of v5p:8x8x8 grow from 3.29 to 3.59 GB. (The fusions of v5e are refused
    # here: "not supported on platforms other than TPU v5e".)
    "TPU v5": _SUMS_ON_SPARSE_CORES | _GATHERS_BESIDE_PRODUCTS,
    # All 32 blocks of a Llama 3 8B, fsdp over 16 of v6e:4x4, 8192 tokens per chip: gathers on SparseCores lower exposed
    # collectives from 31.1 to 0 GB, allocated memory from 12.80 to 12.78 GB. (Of four blocks alone, which leave gaps
    # between arrays, allocated memory grows by 6 %, and what is live by 1 %.)
    "TPU v6 lite": _SUMS_ON_SPARSE_CORES | _GATHERS_ON_SPARSE_CORES,
    # The first option in JAX's guide to GPU performance; with jaxlib 0.10.2 the program is the same without it.
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
"""The options of each kind of chip (`jax.Device.device_kind`), or of all of a platform ("gpu")."""


# The compiler for v5e ends the process if it overlaps an all-gather of 8-bit numbers, such as the int8 base of
# `js.lora`, with an elementwise operation: "Cannot find a valid window for %fusion = (..., s8[1,256,14336], ...)"
# (libtpu 0.0.42 and 0.0.52).
_NOT_WITH_BYTES = (f"{_FUSION}_fuse_kloop_fusions",)


def overlap_options(mesh: Mesh | AbstractMesh, *, with_bytes: bool = False) -> dict[str, Any]:
    """Return the compiler options that overlap collectives with computation on the chips of a mesh.

    Args:
      mesh: the mesh of the step. For a single device, for CPUs and for an abstract mesh the result is {}.
      with_bytes: True if weights of one byte per element are gathered, whose gathers must not overlap elementwise
        operations.
    """
    if isinstance(mesh, AbstractMesh) or mesh.size == 1:
        return {}
    device = mesh.devices.flat[0]
    options = dict(OVERLAP.get(device.device_kind) or OVERLAP.get(device.platform) or {})
    if with_bytes:
        options = {name: value for name, value in options.items() if name not in _NOT_WITH_BYTES}
    return options


def check_options(options: Any) -> dict[str, Any]:
    """Check a user's options, and return a copy of them.

    Raises:
      TypeError: not a mapping from names to values that a compiler takes; the message names the entry.
    """
    if not isinstance(options, Mapping):
        raise TypeError(f"options must be a dict from names of the compiler's options to values, got {options!r}")
    for name, value in options.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, (bool, int, float, str))):
            raise TypeError(
                f"options: {name!r}: {value!r} is no option of a compiler: write its name without dashes and a bool, "
                'number or text, {"xla_tpu_enable_latency_hiding_scheduler": True}, or None for the compiler\'s default'
            )
    return dict(options)


def merge_options(*options: Options) -> dict[str, Any]:
    """Merge mappings of options: a later mapping overrides earlier ones, and the value None removes an option."""
    merged = {name: value for one in options for name, value in one.items()}
    return {name: value for name, value in merged.items() if value is not None}


def describe_options(own: Options) -> list[str]:
    """Return the lines that `print(engine)` shows: the compiler options for each kind of chip, and for all other chips.

    The user's `own` options are merged into each line.
    """
    rows = {chip: merge_options(options, own) for chip, options in OVERLAP.items()} | {"others": merge_options(own)}
    return [f"  {chip}: {', '.join(map(_option, options.items())) or 'none'}" for chip, options in rows.items()]


def _option(item: tuple[str, Any]) -> str:
    name, value = item
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"
