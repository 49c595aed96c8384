"""Which options of public TPU recipes the compiler of each chip takes, tried on a small program, without a TPU.

    python benchmarks/compiler_names.py [--chips v6e]              # fills compiler_names.json and prints its table

Every option of `OPTIONS` is tried by itself: those of AI-Hypercomputer/tpu-recipes (training/trillium and
training/ironwood) and of maxtext's benchmarks/xla_flags_library.py. "taken" means that the compiler did not complain,
not that it changed anything: v5e has no SparseCores and takes the options for them. `compiler_options.py` measures what
options make of a training step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_suffix(".json")
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
_SC = "xla_tpu_enable_sparse_core_collective_offload"
_FUSION = "xla_tpu_enable_async_collective_fusion"

OPTIONS: dict[str, Any] = {
    # Both recipes.
    "xla_tpu_scoped_vmem_limit_kib": 65536,
    f"{_SC}_all_gather": True,
    f"{_SC}_all_reduce": True,
    "xla_tpu_enable_all_gather_offload_tracing": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
    f"{_FUSION}_fuse_all_gather": False,
    "xla_enable_async_all_gather": True,
    "xla_tpu_aggressive_opt_barrier_removal": True,
    # Ironwood.
    "xla_tpu_bf16_emission_mode": "NATIVE_EMISSION",
    "xla_tpu_enable_sparse_core_reduce_scatter_v2": True,
    f"{_SC}_2d_all_gather": True,
    f"{_SC}_3d_all_gather": True,
    f"{_SC}_reduce_scatter": True,
    f"{_SC}_nd_reduce_scatter": True,
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
    "xla_tpu_use_single_sparse_core_for_all_gather_offload": True,
    "xla_tpu_enable_concurrent_sparse_core_offloading": True,
    "xla_max_concurrent_async_all_gathers": 2,
    "xla_max_concurrent_async_reduce_scatters": 2,
    "xla_tpu_enable_offloading_gather_to_sparsecore": True,
    "xla_tpu_sparse_core_all_gather_latency_multiplier": 1,
    "xla_tpu_sparse_core_reduce_scatter_latency_multiplier": 3,
    "xla_tpu_enable_sparse_core_collective_aggregator": True,
    "xla_tpu_enable_latency_hiding_layer_scheduler": True,
    "xla_tpu_rerun_latency_hiding_scheduler_post_sc_assignment": True,
    "xla_tpu_enable_offloading_copy_to_sparsecore": False,
    "xla_tpu_scheduler_percent_shared_memory_limit": 150,
    "xla_tpu_enable_layer_scheduler_for_dependent_collectives": True,
    "xla_tpu_pcie_bandwidth_multiplier": 0.03,
    "xla_tpu_enable_multi_compute_overlap_in_layer_scheduler": True,
    # Trillium.
    f"{_FUSION}": True,
    f"{_FUSION}_multiple_steps": True,
    f"{_FUSION}_fuse_all_reduce": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_all_reduce_offload_tracing": True,
    "xla_sc_enable_instruction_fusion": False,
    "xla_sc_disjoint_spmem": False,
    "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
    "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_data_parallel_opt_different_sized_ops": True,
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_tpu_enable_scheduler_memory_pressure_tracking": True,
    "xla_tpu_host_transfer_overlap_limit": 24,
    "xla_lhs_prioritize_async_depth_over_stall": True,
    "xla_tpu_enable_ag_backward_pipelining": True,
    "xla_should_allow_loop_variant_parameter_in_chain": True,
    "xla_should_add_loop_invariant_op_in_chain": True,
    "xla_max_concurrent_host_send_recv": 100,
    "xla_latency_hiding_scheduler_rerun": 2,
    "xla_tpu_use_bundle_aware_cost_model_for_fusions": False,
    # v5e's fusions, and megacores.
    f"{_FUSION}_fuse_kloop_fusions": True,
    f"{_FUSION}_with_mosaic_custom_call": True,
    "xla_tpu_enable_megacore_fusion": True,
}


def read() -> dict[str, dict[str, str]]:
    """Read {chip and compiler: {option: "" or the refusal}}."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def key(chip: str) -> str:
    return f"{chip}, libtpu {version('libtpu')}"


def record(chip: str, option: str, answer: str) -> None:
    found = read()
    found.setdefault(key(chip), {})[option] = answer
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def try_options(chip: str) -> None:
    """Try the options of a chip that have no answer yet; an option that ends this process is found by its absence."""
    import jax
    import jax.numpy as jnp

    import jaxshard as js

    mesh = js.plan.topology_mesh(CHIPS[chip], data=-1)
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    shape = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=rows)
    gather = partial(jax.lax.with_sharding_constraint, shardings=whole)
    lowered = jax.jit(lambda w: w @ gather(w).T, out_shardings=rows).lower(shape)
    for option in missing(chip):
        record(chip, option, "the compiler ends the process")
        try:
            lowered.compile(compiler_options={option: OPTIONS[option]})
            record(chip, option, "")
        except jax.errors.JaxRuntimeError as error:
            record(chip, option, str(error).split("\n")[0][:160])


def missing(chip: str) -> list[str]:
    return [option for option in OPTIONS if option not in read().get(key(chip), {})]


def table(found: dict[str, dict[str, str]]) -> str:
    lines = ["| option | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for option, value in OPTIONS.items():
        answers = [one.get(option) for one in found.values()]
        cells = ["" if one is None else one or "taken" for one in answers]
        lines.append(f"| `{option}={str(value).lower()}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="*", choices=list(CHIPS), default=list(CHIPS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    if args.child:
        try_options(args.child)
        return
    for chip in args.chips:
        while missing(chip):
            before = len(missing(chip))
            subprocess.run([sys.executable, __file__, "--child", chip], check=False)
            if len(missing(chip)) == before:
                raise SystemExit(f"no option of {chip} could be tried; the messages above say why")
    print(table(read()))


if __name__ == "__main__":
    main()
