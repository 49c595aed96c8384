"""Two memory figures of a compiled step, live at once and allocated, and which of them a TPU's compiler refuses by.

    pip install "jax[tpu]" -e .          # libtpu; no TPU is needed
    python benchmarks/two_figures.py [--only gpt2] [--codegen]
    python benchmarks/two_figures.py --refusal

"Live" is the arguments and the values that are live at the peak; "allocated" is the arguments and the one allocation
that holds all temporaries, gaps included. Both are read from the dump of a process that is stopped once buffers are
assigned; `--codegen` goes on to the end and adds what `memory_analysis()` says of the executable. Gigabytes per chip.

`--refusal` compiles a chain of products with skip connections for one chip, with more and more rows, across the limit:
one chain whose heap has gaps and one that has none. GiB, the unit of the compiler's message. MaxText's rows are those
of `maxtext.py --no-codegen --json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compiler_dump import memory
from plan import ENVIRONMENT, versions
from plan_cases import FIXED

CHOSEN = (0, 2, 3, 4, 10, 15, 16, 26)  # of FIXED
# Seed, number of products, and the numbers of rows that are tried: for the 15.75 GiB of a v5e.
CHAINS = {"with gaps": (1, 14, (4800, 4855, 4860, 4870, 4880, 4900, 5000)), "without": (2, 2, (46300, 46360, 46370))}
# Written when all files that the figures are read from are complete.
ASSIGNED, REFUSED = "*after_optimizations_after_buffer_assignment.txt", "*oom_intermediate_module.txt"


def compile_chain(seed: int, count: int, scale: int, out: str) -> None:
    """Compile products of random numbers of rows, whose results are added again later in another order."""
    import jax
    import jax.numpy as jnp

    import jaxshard as js

    rng = random.Random(seed)
    rows = [rng.randint(20, 100) * scale // 8 * 8 for _ in range(count)]
    order = list(range(count))
    rng.shuffle(order)

    def fit(h: jax.Array, n: int) -> jax.Array:
        return h[:n] if len(h) >= n else jnp.pad(h, ((0, n - len(h)), (0, 0)))

    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        h, kept = jnp.tanh(x @ w), []
        for n in rows:
            h = jnp.tanh(fit(h, n) @ w)
            kept.append(h)
        for i in order:
            h = jnp.tanh(fit(h, rows[i]) @ w) + kept[i]
        return h.sum()

    chip = jax.sharding.SingleDeviceSharding(js.plan.topology_devices("v5e:2x2")[0])
    matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=chip)
    jax.jit(total).lower(matrix, matrix).compile({"xla_dump_to": out})


def figures(command: list[str], *, codegen: bool = False) -> dict[str, Any]:
    """Run a process that compiles into a dump: its figures, and the compiler's words where it refuses."""
    with tempfile.TemporaryDirectory(prefix="jaxshard-figures-") as folder:
        out, log = Path(folder), Path(folder, "log")
        with open(log, "w") as file:
            command = [sys.executable, *command, "--out", folder]
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT)
        while process.poll() is None:
            time.sleep(0.2)
            if not codegen and any(out.glob(ASSIGNED)):
                process.kill()
                process.wait()
        found = memory(out)
        if (out / "found.json").exists():
            found |= json.loads((out / "found.json").read_text())
        elif any(out.glob(REFUSED)):
            found["refused"] = True
        elif not found:
            found["error"] = log.read_text()[-1500:]
    return found


def cells(found: dict[str, Any], unit: float) -> str:
    """Live, allocated, and of a finished executable arguments, temporaries, peak and all that it allocates."""
    if "peak" not in found:
        return f"| {found.get('error', '').splitlines()[-1]} |"
    analysis = found.get("analysis", {})
    sizes = [found["peak"], found["arguments"] + found["temporaries"]]
    sizes += [analysis.get(name) for name in ("arguments", "temporaries", "peak", "allocated")]
    words = " | ".join("-" if size is None else f"{size / unit:.4f}" for size in sizes)
    return f"| {words} | {'refused' if found.get('refused') else ''} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--codegen", action="store_true", help="compile to the end: some minutes for each case")
    parser.add_argument("--refusal", action="store_true", help="the sizes at which the compiler begins to refuse")
    parser.add_argument("--chain", nargs=3, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.chain:
        compile_chain(*args.chain, args.out)
        return
    print(", ".join(f"{name} {number}" for name, number in versions().items()))
    print("| program | live | allocated | arguments | temporaries | peak | all | |\n|---" + "|---:" * 6 + "|---|")
    plan = str(Path(__file__).with_name("plan.py"))
    for case in () if args.refusal else [FIXED[index] for index in CHOSEN if args.only in FIXED[index].name]:
        found = figures([plan, "--child", json.dumps(case)], codegen=args.codegen)
        print(f"| {case.name} {cells(found, 1e9)}", flush=True)
    for name, (seed, count, scales) in CHAINS.items() if args.refusal else ():
        for scale in scales:
            found = figures([__file__, "--chain", *map(str, (seed, count, scale))])
            print(f"| {name}, {scale} {cells(found, 2**30)}", flush=True)


if __name__ == "__main__":
    main()
