"""Options of the compilers: what each makes of a training step's memory, collectives and cycles, without hardware.

    python benchmarks/compiler_options.py                          # the tables of compiler_options.json
    python benchmarks/compiler_options.py --measure [--chips v6e] [--models llama3-8b] [--settings none "SC gathers"]
    python benchmarks/compiler_options.py --measure --cycles [...] # also generates code: minutes instead of seconds

`TPU` and `GPU` have the settings of public recipes: AI-Hypercomputer/tpu-recipes (Trillium, Ironwood) and maxtext's
benchmarks/xla_flags_library.py, and NVIDIA/JAX-Toolbox (rosetta/docs/GPU_performance.md). Each is added to what
`js.explicit` sets for the chip, but for gathers on SparseCores, which are a setting of their own. GPUs need JAX's CUDA
plugin (docs/guides/planner.md), no card.

A program is lowered once and compiled with each setting in a process of its own, which is ended when memory is
assigned. Each row is written as soon as it is there, and what is there is not compiled again: a run that was ended goes
on. A compiler refuses an option, takes it and compiles the same program, or compiles another program. Of these the
tables have, in gigabytes per device:

- live: arguments and what is live at the peak; allocated: the same with the gaps between temporaries,
- waits: bytes of the collectives beside which nothing is computed, and of these the gathers (`js.collectives`),
- operations: collectives in the program's text, those in a loop once,
- cycles: the compiler's estimate of a step, without kernels and collectives; TPUs with `--cycles` alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from maxtext import Row, gigabytes, strategy_of

RESULTS = Path(__file__).with_suffix(".json")
NONE = "none"
"""The setting with nothing but the engine's own options, with which the others are compared."""

_SC = "xla_tpu_enable_sparse_core_collective_offload"
_FUSION = "xla_tpu_enable_async_collective_fusion"
_GATHERS = {f"{_SC}_all_gather": True}

TPU: dict[str, dict[str, Any]] = {
    NONE: {},
    "scoped VMEM 64 MiB": {"xla_tpu_scoped_vmem_limit_kib": 65536},
    "scoped VMEM 96 MiB": {"xla_tpu_scoped_vmem_limit_kib": 98304},
    "native bf16": {"xla_tpu_bf16_emission_mode": "NATIVE_EMISSION"},
    "layer scheduler": {"xla_tpu_enable_latency_hiding_layer_scheduler": True},
    "SC gathers": _GATHERS,
    "layer scheduler, aggregator": {
        "xla_tpu_enable_latency_hiding_layer_scheduler": True,
        "xla_tpu_enable_sparse_core_collective_aggregator": True,
    },
    "SC gathers, one core": _GATHERS | {"xla_tpu_use_single_sparse_core_for_all_gather_offload": True},
    "SC gathers from 32 MiB": _GATHERS | {"xla_tpu_sparse_core_all_gather_offload_min_size_in_bytes": 2**25},
    "SC gathers over 2 and 3 axes": _GATHERS | {f"{_SC}_2d_all_gather": True, f"{_SC}_3d_all_gather": True},
    "SC reduce-scatters, version 2": {"xla_tpu_enable_sparse_core_reduce_scatter_v2": True},
    "SC off": {f"{_SC}_{kind}": False for kind in ("all_gather", "all_reduce", "reduce_scatter")},
    "data-parallel overlap": {
        "xla_tpu_enable_data_parallel_all_reduce_opt": True,
        "xla_tpu_data_parallel_opt_different_sized_ops": True,
    },
    "megacore fusion": {"xla_tpu_enable_megacore_fusion": True},
    "fused gathers": {f"{_FUSION}_fuse_all_gather": True, f"{_FUSION}_multiple_steps": True},
    "fused sums": {"xla_enable_async_all_reduce": True, f"{_FUSION}_fuse_all_reduce": True},
    "host offloading of Trillium": {
        "xla_tpu_enable_all_experimental_scheduler_features": True,
        "xla_tpu_enable_scheduler_memory_pressure_tracking": True,
        "xla_tpu_aggressive_opt_barrier_removal": True,
        "xla_lhs_prioritize_async_depth_over_stall": True,
        "xla_tpu_enable_ag_backward_pipelining": True,
        "xla_latency_hiding_scheduler_rerun": 2,
    },
}

_COMBINED = 2**30
GPU: dict[str, dict[str, Any]] = {
    NONE: {},
    "no latency hiding": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "pipelined gathers": {"xla_gpu_enable_pipelined_all_gather": True},
    "pipelined scatters and sums": {
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
    },
    "double buffering": {"xla_gpu_enable_while_loop_double_buffering": True},
    "combined to 1 GiB": {
        "xla_gpu_all_reduce_combine_threshold_bytes": _COMBINED,
        "xla_gpu_all_gather_combine_threshold_bytes": _COMBINED // 8,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": _COMBINED // 16,
    },
    "no Triton products": {"xla_gpu_enable_triton_gemm": False},
    "no command buffers": {"xla_gpu_enable_command_buffer": ""},
}
GPU["the recipe"] = {name: value for one in list(GPU)[2:] for name, value in GPU[one].items()}

ROWS = {
    ("v5e", "llama2-7b"): Row("llama2-7b", "v5e:16x16", 4096, {"data": 256}),
    ("v5e", "llama3-8b"): Row("llama3-8b", "v5e:16x16", 8192, {"data": 256}),
    ("v5p", "llama3-8b"): Row("llama3-8b", "v5p:4x4x4", 8192, {"data0": 4, "data1": 4, "data2": 4}),
    ("v5p", "llama3-70b tensor"): Row("llama3-70b", "v5p:8x8x8", 8192, {"data": 64, "tensor": 8}, None, "fsdp tensor"),
    ("v6e", "llama2-7b"): Row("llama2-7b", "v6e:4x4", 4096, {"data": 16}),
    ("v6e", "llama3-8b"): Row("llama3-8b", "v6e:4x4", 8192, {"data": 16}),
    ("v6e", "llama3-70b"): Row("llama3-70b", "v6e:16x16", 8192, {"data": 256}),
    ("v6e", "llama3-70b tensor"): Row("llama3-70b", "v6e:16x16", 8192, {"data": 32, "tensor": 8}, None, "fsdp tensor"),
    ("v6e", "mixtral-8x7b"): Row("mixtral-8x7b", "v6e:8x8", 4096, {"data": 64}),
    ("tpu7x", "llama3-8b"): Row("llama3-8b", "tpu7x:4x4x4", 8192, {"data": 128}),
    ("tpu7x", "llama3-70b"): Row("llama3-70b", "tpu7x:4x4x4", 8192, {"data": 128}),
    ("h100", "llama3-8b"): Row("llama3-8b", "h100:8", 4096, {"data": 8}),
}


def lower(row: Row, setting: dict[str, Any] | None = None) -> Any:
    """Lower a training step of ours with the options of its engine but for gathers on SparseCores, and a setting."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxshard as js

    mesh = js.plan.topology_mesh(row.topology, **row.axes)
    model = js.models.make(row.model, seq=row.seq)
    tx = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    layout = js.layout(strategy_of(row), mesh, model.init, tx)
    rows = 1
    for axis in layout.batch_axes:
        rows *= mesh.shape[axis]
    batch = {"tokens": jax.ShapeDtypeStruct((rows, row.seq + 1), jnp.int32)}
    engine = js.explicit(precision="bf16", options=dict.fromkeys(_GATHERS) | (setting or {}))
    return js.make_step(model.loss, tx, layout, engine=engine).lower(batch)


def measure(chip: str, model: str, settings: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Compile a step with each setting until memory is assigned."""
    import jax

    import jaxshard as js
    from jaxshard.compiler.judge import compile_input
    from jaxshard.compiler.topology import Target
    from jaxshard.core.compat import compiler_input

    row, known = ROWS[chip, model], settings_of(chip)
    mesh = js.plan.topology_mesh(row.topology, **row.axes)
    asked = compiler_input(lower(row))
    for setting in settings:
        chosen = dict(asked.overrides) | known[setting]
        found: dict[str, Any] = {"chip": chip, "model": model, "setting": setting, "compiler": compiler_of(chip)}
        with tempfile.TemporaryDirectory() as folder:
            try:
                answer = compile_input(
                    asked._replace(overrides=tuple(chosen.items())), Target(row.topology), Path(folder), 1800
                )
            except jax.errors.JaxRuntimeError as error:
                yield found | {"refused": str(error).split("\n")[0][:200]}
                continue
        memory, text = answer.assignment, answer.text
        assert memory is not None, answer.refusal
        collectives = js.plan.arrays_only(js.collectives(text, mesh))
        waits = [one for one in collectives if one.synchronous]
        yield found | {
            "program": hashlib.sha256(text.encode()).hexdigest()[:12],
            "temporaries": memory.temporaries,
            "live": memory.peak,
            "allocated": memory.allocated,
            "waits": sum(one.bytes for one in waits),
            "gathers waited for": sum(one.bytes for one in waits if one.kind == "all-gather"),
            "moved": sum(one.bytes for one in collectives),
            "operations": len(collectives),
        }


def measure_cycles(chip: str, model: str, setting: str) -> int | None:
    """Compile a step to the end in a process of its own; return the compiler's estimate."""
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([sys.executable, __file__, "--child", chip, model, setting, file.name], check=True)
        return json.loads(Path(file.name).read_text())


def child(chip: str, model: str, setting: str, file: str) -> None:
    from jaxshard.plan.compiled.cycles import estimated_cycles

    compiled = lower(ROWS[chip, model], settings_of(chip)[setting]).compile()
    Path(file).write_text(json.dumps(estimated_cycles(compiled.as_text())))


def settings_of(chip: str) -> dict[str, dict[str, Any]]:
    return GPU if chip == "h100" else TPU


def compiler_of(chip: str) -> str:
    name = "jax-cuda12-pjrt" if chip == "h100" else "libtpu"
    return f"{name} {version(name)}"


Key = tuple[str, str, str, str]


def read(file: Path) -> dict[Key, dict[str, Any]]:
    """Read the rows that were measured, by chip, model, compiler and setting."""
    rows = json.loads(file.read_text()) if file.exists() else []
    return {(one["chip"], one["model"], one["compiler"], one["setting"]): one for one in rows}


def write(file: Path, rows: dict[Key, dict[str, Any]]) -> None:
    file.write_text("[\n" + ",\n".join(json.dumps(one) for one in rows.values()) + "\n]\n")


COLUMNS = ("temporaries", "live", "allocated", "waits", "gathers waited for", "moved")


def tables(rows: Iterable[dict[str, Any]]) -> str:
    """Write one table per program; in brackets the change against the row without the setting."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in rows:
        groups.setdefault((one["chip"], one["model"], one["compiler"]), []).append(one)
    return "\n\n".join(table(name, group) for name, group in groups.items())


def table(name: tuple[str, str, str], rows: list[dict[str, Any]]) -> str:
    base = next((one for one in rows if one["setting"] == NONE), {})
    row = ROWS[name[0], name[1]]
    axes = ", ".join(f"{axis}={size}" for axis, size in row.axes.items())
    lines = [f"{row.model}, {row.topology}, {axes}, rows of {row.seq}, {name[2]}:", ""]
    lines += ["| setting | " + " | ".join((*COLUMNS, "operations", "cycles")) + " |", "|---|" + "---:|" * 8]
    for one in rows:
        if "refused" in one:
            cells = [f"refused: {one['refused']}", *[""] * 7]
        elif one is not base and one["program"] == base.get("program"):
            cells = ["the same program", *[""] * 7]
        else:
            cells = [f"{gigabytes(one[name])}{change(one[name], base.get(name))}" for name in COLUMNS]
            cells += [str(one["operations"]), millions(one, base)]
        lines.append(f"| {one['setting']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def change(size: int, of: int | None) -> str:
    return "" if not of or size == of else f" ({100 * (size / of - 1):+.1f} %)"


def millions(one: dict[str, Any], base: dict[str, Any]) -> str:
    cycles = one.get("cycles")
    return "" if cycles is None else f"{cycles / 1e6:,.1f} M{change(cycles, base.get('cycles'))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="compile what has no row yet")
    parser.add_argument("--cycles", action="store_true", help="with --measure: compile to the end, for cycles")
    parser.add_argument("--chips", nargs="*", help="some of the chips")
    parser.add_argument("--models", nargs="*", help="some of the models")
    parser.add_argument("--settings", nargs="*", help="some of the settings")
    parser.add_argument("--json", type=Path, default=RESULTS, help="the file of the rows")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    if args.child:
        child(*args.child)
        return
    for chip, model in ROWS if args.measure else ():
        if chip not in (args.chips or [chip]) or model not in (args.models or [model]):
            continue
        wanted = [one for one in settings_of(chip) if one in (args.settings or [one])]
        there = read(args.json)
        missing = [one for one in wanted if (chip, model, compiler_of(chip), one) not in there]
        for found in measure(chip, model, missing) if missing else ():
            rows = read(args.json)
            rows[chip, model, found["compiler"], found["setting"]] = found
            write(args.json, rows)
            print(found, flush=True)
        for setting in wanted if args.cycles else ():
            rows = read(args.json)
            one = rows[chip, model, compiler_of(chip), setting]
            if "refused" not in one and "cycles" not in one:
                one["cycles"] = measure_cycles(chip, model, setting)
                write(args.json, rows)
                print(one, flush=True)
    shown = [
        one
        for one in read(args.json).values()
        if one["chip"] in (args.chips or [one["chip"]]) and one["model"] in (args.models or [one["model"]])
    ]
    print(tables(shown))


if __name__ == "__main__":
    main()
