"""Two memory figures of a compiled step, live at once and allocated, and which of them a TPU's compiler refuses by.

    pip install "jax[tpu]" -e .          # libtpu; no TPU is needed
    python benchmarks/two_figures.py [--only gpt2] [--codegen]
    python benchmarks/two_figures.py --refusal

"Live" is the arguments and the values that are live at the peak; "allocated" is the arguments and the one allocation
that holds all temporaries, gaps included. Both are the compiler's, from `js.plan.compile_for`; `--codegen` goes on to
the end and adds what `memory_analysis()` says of the executable. Gigabytes per chip.

`--refusal` compiles a chain of products with skip connections for one chip, with more and more rows, across the limit:
one chain whose heap has gaps and one that has none. GiB, the unit of the compiler's message. MaxText's rows are those
of `maxtext.py --no-codegen --json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from typing import Any

from plan import ENVIRONMENT, KNOWN, versions
from plan_cases import Case, make_parts

CHOSEN = (0, 2, 3, 4, 10, 15, 16, 26)  # of plan_peaks.json
# Seed, number of products, and the numbers of rows that are tried: for the 15.75 GiB of a v5e.
CHAINS = {"with gaps": (1, 14, (4800, 4855, 4860, 4870, 4880, 4900, 5000)), "without": (2, 2, (46300, 46360, 46370))}


def chain(seed: int, count: int, scale: int) -> Any:
    """Lower products of random numbers of rows, whose results are added again later in another order."""
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

    chip = jax.sharding.SingleDeviceSharding(js.plan.topology_mesh("v5e:2x2", data=4).devices.flat[0])
    matrix = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=chip)
    return jax.jit(total).lower(matrix, matrix)


def cells(sizes: Sequence[int | None], refused: bool, unit: float) -> str:
    """Live, allocated, and of a finished executable arguments, temporaries, peak and all that it allocates."""
    words = " | ".join("-" if size is None else f"{size / unit:.4f}" for size in sizes)
    return f"| {words} | {'refused' if refused else ''} |"


def of_case(case: Case, codegen: bool) -> str:
    """Return the cells of a training step."""
    import jaxshard as js

    parts = make_parts(case)
    step = js.make_step(parts.loss, parts.tx, parts.layout, engine=parts.engine)
    verdict = js.plan.compile_for(step, parts.batch, case.topology, codegen=codegen)
    analysis = None if verdict.compiled is None else verdict.compiled.memory_analysis()
    names = ("argument_size_in_bytes", "temp_size_in_bytes", "peak_memory_in_bytes", "total_allocation_bytes")
    more = [getattr(analysis, name, None) for name in names]
    return cells([verdict.live_bytes, verdict.allocated_bytes, *more], bool(verdict.refusal), 1e9)


def of_chain(seed: int, count: int, scale: int) -> str:
    """Return the cells of a chain."""
    from jaxshard.compiler.judge import judge
    from jaxshard.compiler.topology import Target

    found = judge(chain(seed, count, scale), Target("v5e:2x2"))
    assert found.assignment is not None
    return cells([found.assignment.peak, found.assignment.allocated, *[None] * 4], bool(found.refusal), 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--codegen", action="store_true", help="compile to the end: some minutes for each case")
    parser.add_argument("--refusal", action="store_true", help="the sizes at which the compiler begins to refuse")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    print(", ".join(f"{name} {number}" for name, number in versions().items()))
    print("| program | live | allocated | arguments | temporaries | peak | all | |\n|---" + "|---:" * 6 + "|---|")
    known = [Case(**row["case"]) for row in json.loads(KNOWN.read_text())]
    for case in () if args.refusal else [known[index] for index in CHOSEN if args.only in known[index].name]:
        print(f"| {case.name} {of_case(case, args.codegen)}", flush=True)
    for name, (seed, count, scales) in CHAINS.items() if args.refusal else ():
        for scale in scales:
            print(f"| {name}, {scale} {of_chain(seed, count, scale)}", flush=True)


if __name__ == "__main__":
    main()
