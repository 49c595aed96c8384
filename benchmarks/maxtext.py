"""A training step of ours beside MaxText's own, through the same TPU compiler, without a TPU.

    pip install "maxtext[tpu]" -e .          # Python 3.12; one environment for both sides
    python benchmarks/maxtext.py [--rows llama2-7b llama3-8b] [--sides maxtext explicit] [--depth 2] [--json FILE]

Every program is compiled in a process of its own, for chips that are not here (`ROWS` has the models and topologies).
Both sides have f32 parameters and AdamW moments, bf16 products and gradients reduced in bf16. MaxText's defaults are
kept (splash attention, `remat_policy: full`, clipping, no token dropped); "maxtext tiled" is its best setting for
memory. Printed are, per chip, arguments, temporaries, what is live at once (the peak) and what is allocated (with gaps
between temporaries; `two_figures.py` has more about both), CPU-seconds of the compiler, its estimated cycles, the bytes
of collectives by kind and dtype and how many of them a chip waits for (of tokens sent to experts those of an even
routing), and what the compiler computes again on its own.

`bound` is what a step must hold, by role: `lower_bound` has the formula. Where a peak exceeds 1.15 of it the ten
largest buffers that are live at the fullest moment are named. Estimated cycles count loops, but no Pallas kernel and no
collective: the compiler has no estimate of these.

With `--no-codegen` a compilation is stopped when buffers are assigned, after a fifth of the time: all but its seconds
and cycles is known by then. `--axes x=16,y=16` tries another mesh for our side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from compiler_dump import final_text, is_assigned, memory

FOUND = "found.json"
TARGET = 1.15
"""The most that a peak may be of its lower bound."""


class Row(NamedTuple):
    """A model on a topology: rows of `seq` tokens, `rows` of them per chip of the batch axes.

    Attributes:
      model: the size, by the name that it has on both sides.
      topology: as `js.plan.topology_mesh` takes it.
      maxtext: MaxText's name of it, and settings; None where only ours is compiled.
      axes: of our mesh.
      strategy: "fsdp" over all axes, or the words of `strategy_of`; "expert" is over those called so.
      slices: TPU slices.
      microbatches: of the pipeline, where there is one.
      sides: what is compiled. Ours begin with the engine; "f32" after it is f32 sums of gradients, "each" is
        scatter="each" of a pipeline, and "stash ..." at the end what it keeps.
    """

    model: str
    topology: str
    seq: int
    axes: dict[str, int]
    maxtext: dict[str, Any] | None = None
    strategy: str = "fsdp"
    slices: int = 1
    microbatches: int = 1
    sides: tuple[str, ...] = ("maxtext", "auto", "explicit", "explicit f32")


SPLIT = ("maxtext", "explicit")
ROWS = {
    "llama2-7b": Row("llama2-7b", "v5e:16x16", 4096, {"data": 256}, {"compile_topology": "v5e-256"}),
    "llama3-8b": Row(
        "llama3-8b", "v5e:16x16", 8192, {"data": 256}, {"compile_topology": "v5e-256"},
        sides=("maxtext", "maxtext tiled", "auto", "explicit", "explicit f32"),
    ),
    "llama3-8b-v5p": Row(
        "llama3-8b", "v5p:4x4x4", 8192, {"data0": 4, "data1": 4, "data2": 4}, {"compile_topology": "v5p-128"}
    ),
    "llama3-70b": Row(
        "llama3-70b", "v5p:8x8x8", 8192, {"data0": 8, "data1": 8, "data2": 8}, {"compile_topology": "v5p-1024"}
    ),
    "llama3-8b-pipe": Row(
        "llama3-8b", "v5p:4x4x8", 8192, {"data": 8, "tensor": 4, "pipe": 4}, None, "fsdp tensor pipe",
        microbatches=8, sides=("pipelined", "pipelined each"),
    ),
    "llama3-70b-tensor": Row(
        "llama3-70b", "v5p:8x8x8", 8192, {"data": 64, "tensor": 8},
        {"compile_topology": "v5p-1024", "ici_fsdp_parallelism": 64, "ici_tensor_parallelism": 8,
         "per_device_batch_size": 0.125},
        "fsdp tensor", sides=SPLIT,
    ),
    "llama3-8b-tensor": Row(
        "llama3-8b", "v5e:16x16", 8192, {"data": 32, "tensor": 8}, None, "fsdp tensor", sides=("auto", "explicit")
    ),
    "llama3-8b-slices": Row(
        "llama3-8b", "v5e:16x16", 8192, {"replica": 2, "data": 256}, None, "hsdp", slices=2, sides=("explicit",)
    ),
}  # fmt: skip
STASHES = ("layer", "attention_out=save", "qkv=save,attention_out=save", "stage", "dots", "everything")
ROWS["llama3-8b-stash"] = ROWS["llama3-8b-pipe"]._replace(
    sides=tuple(f"{side} stash {stash}" for stash in STASHES for side in ("pipelined", "pipelined each"))
)
"""The rows by name; the first four are compared with MaxText over one data axis."""


def rows_of_experts() -> Iterator[tuple[str, Row]]:
    """Models with experts, without loss of tokens: split as all parameters, and by their number over an axis.

    "maxtext ring" gathers tokens where the default's ragged all-to-alls are refused, on more than 16 chips of v5e (only
    when code is generated: not with `--no-codegen`).
    """
    settings = {
        "v5e": {"compile_topology": "v5e-256", "allow_split_physical_axes": True},
        "v5p": {"compile_topology": "v5p-128"},
    }
    for model, theirs, experts in (
        ("mixtral-8x7b", "mixtral-8x7b", 8),
        ("qwen3-30b-a3b", "qwen3-30b-a3b", 16),
        ("deepseek-16b", "deepseek2-16b", 16),
    ):
        axes = {"v5e": {"data": 256 // experts, "expert": experts}, "v5p": {"data0": 4, "data1": 4, "expert": 4}}
        whole = {"v5e": {"data": 256}, "v5p": {"data0": 4, "data1": 4, "data2": 4}}
        for chip, topology in (("v5e", "v5e:16x16"), ("v5p", "v5p:4x4x4")):
            plain = {"model_name": theirs} | settings[chip]
            split = plain | {"ici_expert_parallelism": axes[chip]["expert"]}
            yield f"{model}-{chip}", Row(model, topology, 4096, whole[chip], plain, sides=SPLIT)
            sides = ("maxtext", "maxtext ring", "explicit") if chip == "v5e" else SPLIT
            yield f"{model}-{chip}-expert", Row(model, topology, 4096, axes[chip], split, "fsdp expert", sides=sides)


ROWS |= dict(rows_of_experts())

SHAPES: dict[str, dict[str, int]] = {
    "llama2-7b": {"vocab": 32_000, "width": 4096, "depth": 32, "heads": 32, "kv_heads": 32, "hidden": 11_008},
    "llama3-8b": {"vocab": 128_256, "width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14_336},
    "llama3-70b": {"vocab": 128_256, "width": 8192, "depth": 80, "heads": 64, "kv_heads": 8, "hidden": 28_672},
}
"""What the lower bound is made of."""


def lower_bound(row: Row, depth: int | None, arguments: int, head_chunks: int = 16) -> dict[str, int]:
    """Bytes that a chip must hold, by role; products are in bf16, one row of T tokens per chip.

    Their sum is the bound. A program that never holds all of them at once can stay below it.

    - arguments: f32 parameters and two moments over the chips, and the batch, as compiled,
    - saved: the input of every block, L T C,
    - weights: the largest layer's, gathered, twice (one is computed with while the next arrives),
    - gradient: that layer's before it is reduced,
    - embedding: the gathered table, V C,
    - head: one of `head_chunks` chunks of the vocabulary: its part of the matrix, and its logits in f32,
    - block: what one block's backward pass works on: input, both norms, queries, keys, values, attention and its
      gradient, gate, up, their product and its gradient, and the gradient of the output.
    """
    shape = SHAPES[row.model]
    C, F, V, T = shape["width"], shape["hidden"], shape["vocab"], row.seq
    KD = C // shape["heads"] * shape["kv_heads"]
    weights = 2 * C * C + 2 * C * KD + 3 * C * F
    return {
        "arguments": arguments,
        "saved": 2 * (depth or shape["depth"]) * T * C,
        "weights": 2 * 2 * weights,
        "gradient": 2 * weights,
        "embedding": 2 * V * C,
        "head": V // head_chunks * (2 * C + 4 * T),
        "block": 2 * T * (7 * C + 2 * KD + 4 * F),
    }


def maxtext_settings(row: Row, side: str, depth: int | None) -> dict[str, Any]:
    """MaxText's settings: its defaults but for the model, the topology, and what reads or writes files."""
    assert row.maxtext is not None
    layers = {"override_model_config": True, "base_num_decoder_layers": depth} if depth else {}
    sides = {"maxtext tiled": {"num_vocab_tiling": 16}, "maxtext ring": {"use_ring_of_experts": True}}
    common = {
        "model_name": row.model,
        "compile_topology_num_slices": row.slices,
        "per_device_batch_size": 1,
        "max_target_length": row.seq,
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "log_config": False,
        "run_name": "benchmark",
        "base_output_directory": tempfile.gettempdir(),
    }
    return common | row.maxtext | layers | sides.get(side, {})


def compile_maxtext(row: Row, side: str, depth: int | None) -> None:
    """Compile MaxText's training step."""
    here = Path(__file__).resolve().parent
    sys.path = [folder for folder in sys.path if Path(folder).resolve() != here]  # this file has MaxText's name
    import maxtext
    from maxtext.trainers.pre_train import train_compile

    config = Path(maxtext.__file__).parent / "configs" / "base.yml"
    settings = maxtext_settings(row, side, depth)
    train_compile.main(["train_compile", str(config), *(f"{name}={value}" for name, value in settings.items())])


def compile_ours(row: Row, side: str, depth: int | None, options: dict[str, str]) -> None:
    """Compile a step of `js.models.make`'s model with its defaults."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxshard as js

    mesh = js.plan.topology_mesh(row.topology, num_slices=row.slices, **row.axes)
    model = js.models.make(row.model, seq=row.seq, **({"depth": depth} if depth else {}))
    tx = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    layout = js.layout(strategy_of(row), mesh, model.init, tx)
    sums = {"reduce_dtype": jnp.float32} if side.endswith("f32") else {}
    engine: js.Engine
    if side.startswith("pipelined"):
        scatter: Literal["each", "end"] = "each" if "each" in side.split() else "end"
        stash: Any = side.partition(" stash ")[2] or "layer"
        if "=" in stash:
            stash = dict(one.split("=") for one in stash.split(","))
        engine = js.pipelined(microbatches=row.microbatches, precision="bf16", scatter=scatter, stash=stash, **sums)
    else:
        make_engine = {"auto": js.auto, "explicit": js.explicit}[side.split()[0]]
        engine = make_engine(precision="bf16", **sums)
    rows = row.microbatches
    for axis in layout.batch_axes:
        rows *= mesh.shape[axis]
    batch = {"tokens": jax.ShapeDtypeStruct((rows, row.seq + 1), jnp.int32)}
    js.make_step(model.loss, tx, layout, engine=engine).lower(batch).compile(options or None)


def strategy_of(row: Row) -> Any:
    import jaxshard as js

    if row.strategy == "fsdp":
        return js.fsdp(tuple(row.axes))
    if row.strategy == "fsdp expert":
        return js.compose(js.fsdp(tuple(row.axes)), js.expert(tuple(x for x in row.axes if x.startswith("expert"))))
    if row.strategy == "hsdp":
        return js.hsdp()
    if "pipe" in row.strategy:
        return js.compose(js.fsdp("data"), js.tensor(), js.pipeline("pipe", chunks=2))
    return js.compose(js.fsdp("data"), js.tensor((("sequence", "split"), *js.RULES)))


def child(row: Row, side: str, depth: int | None, out: Path, options: dict[str, str]) -> None:
    """Compile one program in this process, and write what was found to a file."""
    import jax

    compile_lowered = jax.stages.Lowered.compile
    found: dict[str, Any] = {}

    def measured(lowered: Any, compiler_options: Any = None, **kwargs: Any) -> Any:
        chosen = dict(compiler_options or {}) | {"xla_dump_to": str(out)}
        started, cpu = time.time(), time.process_time()
        compiled = compile_lowered(lowered, compiler_options=chosen, **kwargs)
        seconds, cpu = time.time() - started, time.process_time() - cpu
        if cpu > found.get("compile_cpu_seconds", 0):  # the step is the longest
            found.update(compile_cpu_seconds=cpu, compile_seconds=seconds, **sizes(compiled))
        return compiled

    jax.stages.Lowered.compile = measured
    try:
        if side.startswith("maxtext"):
            compile_maxtext(row, side, depth)
        else:
            compile_ours(row, side, depth, options)
    except Exception as error:  # a compiler's refusal is a result: the other programs are still to be compiled
        traceback.print_exc()
        found.setdefault("error", f"{type(error).__name__}: {error}"[:2000])
    (out / FOUND).write_text(json.dumps(found))


def sizes(compiled: Any) -> dict[str, int]:
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
    }


def numbers(text: str, row: Row, depth: int | None) -> dict[str, Any]:
    """What a program communicates, waits for and computes again, from its text."""
    import jaxshard as js
    from jaxshard.hlo.instructions import in_host_memory, rematerialized
    from jaxshard.plan.compiled.cycles import estimated_cycles

    # Positions are the program's own, whichever mesh it was compiled for: only kinds and bytes are of interest.
    mesh = js.plan.topology_mesh(row.topology, num_slices=row.slices, **row.axes)
    sums: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    waits, wire = [], 0
    for one in js.plan.arrays_only(js.collectives(text, mesh)):
        one = with_even_routing(one, row, depth)
        entry = sums[one.kind, one.dtype]
        entry[0] += one.bytes
        entry[2] += received(one)
        if one.synchronous:
            entry[1] += one.bytes
            waits.append(one)
            wire += received(one)
    return {
        "cycles": estimated_cycles(text),
        "collectives": [
            {"kind": kind, "dtype": dtype, "bytes": total, "synchronous": waited, "received": on_wire}
            for (kind, dtype), (total, waited, on_wire) in sorted(sums.items(), key=lambda item: -item[1][0])
        ],
        "wire_waited": wire if sums else None,
        "waits": [
            f"{gigabytes(one.bytes)} GB {one.kind} {one.count} x {one.dtype}{list(one.shapes[0])} {one.op_name}"
            for one in sorted(waits, key=lambda one: -(one.bytes or 0))[:10]
        ],
        "rematerialized": [f"{one.op} ({one.bytes or 0:,} bytes, {one.source})" for one in rematerialized(text)],
        "in_host_memory": [str(one) for one in in_host_memory(text)],
    }


def with_even_routing(one: Any, row: Row, depth: int | None) -> Any:
    """An exchange of tokens as it is if every expert gets as many of them.

    The number of ours is that of the windows, which a program does not say. A ragged one moves the rows that there
    are, whatever the size of its operand and in however many windows.
    """
    ragged = one.kind == "ragged-all-to-all"
    if one.count is not None and not ragged:
        return one
    import jaxshard as js
    from jaxshard.layers.moe.experts import window_rows

    shape = js.models.SIZES[row.model].shape
    blocks = (depth or shape["depth"]) - shape.get("dense", 0)
    k, chips = shape["k"], len(one.groups[0])
    rows = row.seq * k
    if ragged:
        turns, sizes = 1, tuple(size * rows // arrays[0] for size, arrays in zip(one.sizes, one.shapes, strict=True))
    else:
        turns, sizes = -(-rows // window_rows(rows, k, chips, shape["experts"] // chips)), one.sizes
    return replace(one, count=blocks * turns if one.count is None else one.count, sizes=sizes)


def received(one: Any) -> int:
    """Bytes that a chip receives of a collective over rings: an all-reduce is a reduce-scatter and an all-gather.

    Over several axes a gather or scatter is one operation per axis, each of which counts its own result, or operand; on
    the wire these add up to one over all the chips.
    """
    chips = len(one.groups[0])
    share = 1.0 if one.kind == "collective-permute" else (chips - 1) / chips
    return int((one.bytes or 0) * share * (2 if one.kind == "all-reduce" else 1))


def run_one(name: str, side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compile one program in a process of its own; returns what it takes, and what is live when it is fullest."""
    out = Path(args.dump or tempfile.mkdtemp(prefix="maxtext-benchmark-")) / f"{name}-{side.replace(' ', '-')}"
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    command = [sys.executable, __file__, "--child", name, side, str(out), *flags_of(args)]
    with open(out / "log.txt", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        stopped = False
        while process.poll() is None:
            time.sleep(1)
            if args.no_codegen and not stopped and is_assigned(out):
                time.sleep(3)
                process.kill()
                stopped = True
    if not stopped and not (out / FOUND).exists():
        return {"row": name, "side": side, "error": f"exit status {process.returncode}, see {out / 'log.txt'}"}
    found = {"row": name, "side": side} | memory(out)
    found |= {} if stopped else json.loads((out / FOUND).read_text())
    if found.get("error"):
        return found
    row = row_of(name, args)
    found |= numbers(final_text(out), row, args.depth)
    if row.strategy == "fsdp" and row.model in SHAPES:
        bound = lower_bound(row, args.depth, found["arguments"])
        found |= {"bound": sum(bound.values()), "bound_parts": bound}
    return found


def row_of(name: str, args: argparse.Namespace) -> Row:
    row = ROWS[name]
    if args.axes:
        row = row._replace(axes={axis: int(size) for axis, size in (one.split("=") for one in args.axes.split(","))})
    return row


def flags_of(args: argparse.Namespace) -> list[str]:
    """The flags that a child needs too."""
    flags = [f"--depth={args.depth}"] if args.depth else []
    flags += [f"--axes={args.axes}"] if args.axes else []
    return flags + [f"--option={one}" for one in args.option]


COLUMNS: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
    "row": lambda one, _: one["row"],
    "side": lambda one, _: one["side"],
    "arguments": lambda one, _: gigabytes(one.get("arguments")),
    "temporaries": lambda one, _: gigabytes(one.get("temporaries")),
    " of MaxText's": lambda one, base: ratio(one.get("temporaries"), base.get("temporaries")),
    "live": lambda one, _: gigabytes(one.get("peak")),
    "of MaxText's  ": lambda one, base: ratio(one.get("peak"), base.get("peak")),
    "allocated": lambda one, _: gigabytes(one.get("allocated")),
    "  of MaxText's": lambda one, base: ratio(one.get("allocated"), base.get("allocated")),
    "bound": lambda one, _: gigabytes(one.get("bound")),
    "of bound": lambda one, _: ratio(one.get("peak"), one.get("bound")),
    "compile CPU-s": lambda one, _: f"{one['compile_cpu_seconds']:.0f}" if "compile_cpu_seconds" in one else "",
    "cycles": lambda one, _: f"{one['cycles'] / 1e6:.1f} M" if one.get("cycles") else "",
    "collectives": lambda one, _: gigabytes(total(one, "bytes")),
    "waited for": lambda one, _: gigabytes(total(one, "synchronous")),
    "of MaxText's": lambda one, base: ratio(total(one, "synchronous"), total(base, "synchronous")),
    "received": lambda one, _: gigabytes(one.get("wire_waited")),
    "of MaxText's ": lambda one, base: ratio(one.get("wire_waited"), base.get("wire_waited")),
    "all received": lambda one, _: gigabytes(total(one, "received")),
    " of MaxText's ": lambda one, base: ratio(total(one, "received"), total(base, "received")),
    ".remat": lambda one, _: str(len(one["rematerialized"])) if "rematerialized" in one else "",
}


def total(one: dict[str, Any], key: str) -> int | None:
    """The sum over all collectives; None where none was read: nothing is known of what is waited for then."""
    return sum(entry[key] for entry in one["collectives"]) if one.get("collectives") else None


def gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.3f}"


def ratio(size: int | None, of: int | None) -> str:
    return "" if not size or not of else f"{size / of:.3f}"


def table(results: Iterable[dict[str, Any]]) -> str:
    """The results as Markdown; gigabytes per chip."""
    results = list(results)
    bases = {one["row"]: one for one in results if one["side"] == "maxtext"}
    lines = ["| " + " | ".join(map(str.strip, COLUMNS)) + " |", "|---|---" + "|---:" * (len(COLUMNS) - 2) + "|"]
    for one in results:
        cells = [cell(one, bases.get(one["row"], {})) for cell in COLUMNS.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def details(one: dict[str, Any]) -> str:
    """What the table has no room for: the collectives, errors, what is computed again, the largest buffers."""
    lines = [f"{one['row']}, {one['side']}:"]
    lines += [f"  error: {one['error']}"] if "error" in one else []
    for entry in one.get("collectives", []):
        lines.append(
            f"  {entry['kind']} {entry['dtype']}: {gigabytes(entry['bytes'])} GB, of these synchronous "
            f"{gigabytes(entry['synchronous'])}, received {gigabytes(entry['received'])}"
        )
    lines += [f"  waited for: {entry}" for entry in one.get("waits", [])]
    lines += [f"  computed again: {entry}" for entry in one.get("rematerialized", [])]
    if one.get("peak", 0) > TARGET * one.get("bound", float("inf")):
        lines += [f"  live: {entry}" for entry in one.get("largest", [])]
    return "\n".join(lines)


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("jax", "libtpu", "maxtext", "flax", "optax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS)[:4])
    parser.add_argument("--sides", nargs="*", help="some of a row's sides")
    parser.add_argument("--depth", type=int, help="so many blocks instead of the model's own, for a quick try")
    parser.add_argument("--axes", default="", help="another mesh for our side, such as x=16,y=16")
    parser.add_argument("--option", action="append", default=[], help="name=value: an option of the compiler, for ours")
    parser.add_argument(
        "--no-codegen", action="store_true", help="stop before code is generated: no seconds and cycles"
    )
    parser.add_argument("--dump", help="a folder that keeps the compiler's dumps and the programs")
    parser.add_argument("--json", help="where to write the results; those of other rows and sides there are kept")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    if args.child:
        name, side, out = args.child
        child(row_of(name, args), side, args.depth, Path(out), dict(one.split("=", 1) for one in args.option))
        return
    results: dict[tuple[str, str], dict[str, Any]] = {}
    if args.json and Path(args.json).exists():
        results = {(one["row"], one["side"]): one for one in json.loads(Path(args.json).read_text())["results"]}
    print(", ".join(f"{name} {number}" for name, number in versions().items()), flush=True)
    for name in args.rows:
        for side in ROWS[name].sides:
            if not args.sides or side in args.sides:
                results[name, side] = run_one(name, side, args) | {
                    "versions": versions(),
                    "depth": args.depth,
                    "axes": args.axes,
                }
                print(details(results[name, side]), flush=True)
                if args.json:
                    Path(args.json).write_text(json.dumps({"results": list(results.values())}, indent=1))
    print(table(results.values()))


if __name__ == "__main__":
    main()
