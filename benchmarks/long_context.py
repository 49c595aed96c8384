"""Rows too long for one chip: a training step under `js.context`, and MaxText's, through the same TPU compiler.

    pip install "maxtext[tpu]" -e .          # Python 3.12; ours alone: pip install "jax[tpu]" -e .
    python benchmarks/long_context.py --no-codegen [--rows 128k 1m] [--sides gather maxtext] [--depth 2] [--json FILE]

Every program is compiled in a process of its own, for chips that are not here. Both sides have f32 parameters and AdamW
moments, bf16 products and gradients reduced in bf16; ours is `js.explicit` with the defaults of `js.models.make`,
MaxText's its defaults with gathered keys and values in its balanced order. Printed are arguments, temporaries and peak
per chip, the bytes that a chip receives for attention, and all it receives by kind of collective; then what is
live when it is fullest.

`--no-codegen` stops a compilation when buffers are assigned, and `--layer` compiles one layer of attention alone with
its gradient. `--topology v5p:2x2x2 --axes context0=2,context1=2,context2=2` tries another slice for our sides.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent


class Row(NamedTuple):
    """Rows of llama3-8b on a topology.

    Attributes:
      topology: as `js.plan.topology_mesh` takes it.
      seq: tokens of a row.
      data: mesh axes over which rows are split, with their sizes.
      context: the same for positions.
      usp: the axes of the context for "usp": keys are gathered over the first, heads exchanged over the second.
      maxtext: MaxText's settings for the same.
    """

    topology: str
    seq: int
    data: dict[str, int]
    context: dict[str, int]
    usp: dict[str, int]
    maxtext: dict[str, Any]


ROWS = {
    "128k": Row(
        "v5e:16x16", 131_072, {"data": 16}, {"context": 16}, {"context": 2, "heads": 8},
        {"compile_topology": "v5e-256", "ici_context_parallelism": 16, "per_device_batch_size": 1 / 16},
    ),
    "1m": Row(
        "v5p:4x4x4", 1_048_576, {}, {"context0": 4, "context1": 4, "context2": 4}, {"context": 4, "heads": 16},
        {"compile_topology": "v5p-128", "ici_context_parallelism": 64, "per_device_batch_size": 1 / 64},
    ),
}  # fmt: skip
"""One row of 1,048,576 tokens over 64 chips, and 16 of 131,072 over 16 chips each."""

MAXTEXT: dict[str, dict[str, Any]] = {
    "maxtext": {},
    "maxtext tiled": {"num_vocab_tiling": 16},
    "maxtext ring": {"context_parallel_strategy": "ring", "attention": "flash", "use_tokamax_splash": True},
}
"""MaxText's settings for its sides: its default, its least memory, and its ring, which needs another kernel."""

SIDES = ("gather", "ulysses", "usp", "ring", *MAXTEXT)
REMAT: dict[str, dict[str, Any]] = {
    "block_in": {},
    "attention_out": {"remat": {"attention_out": "save"}},
    "offload": {"remat": {"block_in": "offload"}},
}
"""What our blocks keep: their input, which is the default, also the attention's output, or their input on the host."""


def load_maxtext_benchmark() -> Any:
    """Import `maxtext.py` beside this file, under a name that is not MaxText's own."""
    spec = importlib.util.spec_from_file_location("beside_maxtext", HERE / "maxtext.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compile_ours(row: Row, how: str, args: argparse.Namespace) -> None:
    """Compile a step of `js.models.make`'s model with its defaults."""
    import jax
    import jax.numpy as jnp
    import optax

    import jaxshard as js

    axes = row.usp if how == "usp" else row.context
    mesh = js.plan.topology_mesh(row.topology, **row.data, **axes)
    model = js.models.make("llama3-8b", seq=row.seq, **({"depth": args.depth} if args.depth else {}))
    tx = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    strategy = js.compose(js.fsdp((*row.data, *axes)), js.context(tuple(axes), how=how))  # type: ignore[arg-type]
    layout = js.layout(strategy, mesh, model.init, tx)
    rows = max(1, next(iter(row.data.values()), 1))
    tokens = jax.ShapeDtypeStruct((rows, row.seq), jnp.int32)
    step = js.make_step(model.loss, tx, layout, engine=js.explicit(precision="bf16", **REMAT[args.remat]))
    step.lower({"tokens": tokens, "targets": tokens}).compile()


def compile_layer(row: Row, how: str) -> None:
    """Compile attention alone, 32 heads that share 8 of keys and values, and its gradients."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxshard as js
    from jaxshard.layers.attention.context import Kernels, attend_in_context
    from jaxshard.layers.attention.formula import Extras, Form
    from jaxshard.layers.attention.splash import splash
    from jaxshard.layers.attention.splash_chunks import splash_chunks
    from jaxshard.layers.attention.splash_ring import splash_turns

    axes = row.usp if how == "usp" else row.context
    mesh = js.plan.topology_mesh(row.topology, **row.data, **axes)
    split = PartitionSpec(tuple(row.data) or None, tuple(axes))
    kernels = Kernels(splash, splash_chunks, splash_turns())

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = attend_in_context(q, k, v, Extras(), Form(True), kernels=kernels, axes=tuple(axes), how=how)
        return (out.astype(jnp.float32) ** 2).sum()

    def array(heads: int) -> Any:
        rows = next(iter(row.data.values()), 1)
        return jax.ShapeDtypeStruct((rows, row.seq, heads, 128), jnp.bfloat16, sharding=NamedSharding(mesh, split))

    grads = jax.shard_map(
        jax.grad(loss, (0, 1, 2)), mesh=mesh, in_specs=(split,) * 3, out_specs=(split,) * 3, check_vma=False
    )
    jax.jit(grads).lower(array(32), array(8), array(8)).compile()


def child(row: Row, side: str, args: argparse.Namespace, out: Path) -> None:
    """Compile one program in this process, and write what was found to a file."""
    import jax

    beside = load_maxtext_benchmark()
    compile_lowered = jax.stages.Lowered.compile
    found: dict[str, Any] = {}

    def measured(lowered: Any, compiler_options: Any = None, **kwargs: Any) -> Any:
        options = dict(compiler_options or {}) | {"xla_dump_to": str(out)}
        started, cpu = time.time(), time.process_time()
        compiled = compile_lowered(lowered, compiler_options=options, **kwargs)
        cpu = time.process_time() - cpu
        if cpu > found.get("compile_cpu_seconds", 0):  # the step is the longest
            found.update(compile_cpu_seconds=cpu, compile_seconds=time.time() - started, **beside.sizes(compiled))
        return compiled

    jax.stages.Lowered.compile = measured  # type: ignore[method-assign]
    try:
        if side.startswith("maxtext"):
            sys.path = [folder for folder in sys.path if Path(folder).resolve() != HERE]  # a file there is maxtext.py
            make_tables_quickly()
            depth = {"override_model_config": True, "base_num_decoder_layers": args.depth} if args.depth else {}
            settings = row.maxtext | {"context_parallel_load_balance": True} | MAXTEXT[side] | depth
            settings |= dict(one.split("=", 1) for one in args.setting)
            beside.compile_maxtext(beside.Row("llama3-8b", row.topology, row.seq, {}, settings), side, None)
        elif args.layer:
            compile_layer(row, side)
        else:
            compile_ours(row, side, args)
    except Exception as error:  # a compiler's refusal is a result
        traceback.print_exc()
        found.setdefault("error", f"{type(error).__name__}: {error}"[:1500])
    (out / beside.FOUND).write_text(json.dumps(found))


def make_tables_quickly() -> None:
    """Have MaxText's masks tell whole and empty blocks without computing them: the same tables of blocks, sooner.

    JAX looks at every block of 512 x 512 of the mask on the host, several times, which for 1,048,576 positions takes
    about 48 CPU-minutes.
    """
    import numpy as np
    from maxtext.layers.attention_op import LoadBalancedCausalMask as Mask

    compute = Mask.__getitem__

    def look(mask: Any, index: Any) -> Any:
        rows, columns = index
        queries = mask.q_sequence[rows]
        if queries.min() >= columns.stop - 1:
            return np.ones((1, 1), bool)
        return np.zeros((1, 1), bool) if queries.max() < columns.start else compute(mask, index)

    Mask.__getitem__ = look


def numbers(text: str, row: Row, side: str, beside: Any) -> dict[str, Any]:
    """Bytes that a chip receives, by kind of collective and those of attention among them."""
    import jaxshard as js

    mesh = js.plan.topology_mesh(row.topology, **row.data, **(row.usp if side == "usp" else row.context))
    kinds: defaultdict[str, int] = defaultdict(int)
    of_attention = 0
    for one in js.plan.arrays_only(js.collectives(text, mesh)):
        kinds[one.kind] += beside.received(one)
        if any(size in shape for shape in one.shapes for size in sequence_sizes(row)):
            of_attention += beside.received(one)
    return {"received": dict(kinds), "of_attention": of_attention}


def sequence_sizes(row: Row) -> set[int]:
    """The lengths that parts of a row have on the way; no dimension of a weight is as long."""
    sizes, part = {row.seq}, row.seq
    for size in reversed(row.context.values()):
        part //= size
        sizes.add(part)
    return {size for size in sizes if size not in (4096, 14_336)}


def run_one(name: str, side: str, args: argparse.Namespace) -> dict[str, Any]:
    """Compile one program in a process of its own; returns what it takes, and what is live when it is fullest."""
    beside = load_maxtext_benchmark()
    out = Path(tempfile.mkdtemp(prefix=f"long-context-{name}-{side.replace(' ', '-')}-", dir=args.dump))
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name, side, str(out)]
    stopped = False
    with open(out / "log.txt", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(1)
            if args.no_codegen and not stopped and beside.is_assigned(out):
                time.sleep(3)
                process.kill()
                stopped = True
    if not stopped and not (out / beside.FOUND).exists():
        return {"error": f"exit status {process.returncode}, see {out / 'log.txt'}"}
    found = beside.memory(out) | ({} if stopped else json.loads((out / beside.FOUND).read_text()))
    if "error" in found:
        return found | {"log": str(out / "log.txt")}
    return found | numbers(beside.program_text(out), row_of(name, args), side, beside) | {"dump": str(out)}


def row_of(name: str, args: argparse.Namespace) -> Row:
    row = ROWS[name]
    if args.seq:
        row = row._replace(seq=args.seq)
    if args.topology:
        row = row._replace(topology=args.topology)
    if args.axes:
        axes = {axis: int(size) for axis, size in (one.split("=") for one in args.axes.split(","))}
        row = row._replace(data={}, context=axes, usp=axes)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--depth", type=int, help="so many blocks instead of 32, for a quick try")
    parser.add_argument("--topology", default="", help="another one, such as v5p:2x2x4, with --axes")
    parser.add_argument("--axes", default="", help="the context's axes there, for our sides, such as context=16")
    parser.add_argument("--seq", type=int, help="another number of tokens in a row")
    parser.add_argument("--remat", choices=REMAT, default="block_in", help="what our blocks keep")
    parser.add_argument("--setting", action="append", default=[], help="name=value: a setting more of MaxText's")
    parser.add_argument("--layer", action="store_true", help="attention alone")
    parser.add_argument(
        "--no-codegen", action="store_true", help="stop before code is generated, after a fifth of the time"
    )
    parser.add_argument("--dump", help="a folder that keeps the compiler's dumps and the programs")
    parser.add_argument("--json", help="where to write the results; those that are there are kept")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
    if args.child:
        name, side, out = args.child
        child(row_of(name, args), side, args, Path(out))
        return
    results = json.loads(Path(args.json).read_text()) if args.json and Path(args.json).exists() else []
    print(", ".join(f"{name} {number}" for name, number in load_maxtext_benchmark().versions().items()), flush=True)
    for name in args.rows:
        for side in args.sides:
            asked = {key: value for key, value in vars(args).items() if value and key not in NOT_ASKED}
            one = {"row": name, "side": side} | asked | run_one(name, side, args)
            results.append(one)
            print("\n".join([line(one), *(f"    live: {entry}" for entry in one.get("largest", []))]), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=1))


NOT_ASKED = ("rows", "sides", "dump", "json", "child")


def line(one: dict[str, Any]) -> str:
    if "temporaries" not in one:
        return f"| {one['row']} | {one['side']} | {one.get('error')} {one.get('log', '')} |"
    gigabytes = [f"{one[key] / 1e9:.3f}" for key in ("arguments", "temporaries", "peak", "of_attention")]
    kinds = ", ".join(f"{kind} {size / 1e9:.3f}" for kind, size in sorted(one["received"].items()))
    seconds = f"{one['compile_cpu_seconds']:.0f} s" if "compile_cpu_seconds" in one else ""
    return "| " + " | ".join([one["row"], one["side"], *gigabytes, kinds, seconds]) + " |"


if __name__ == "__main__":
    main()
