"""The page that `plan.py --write` makes of its record: every drawn step with its estimated and compiled peak."""

from __future__ import annotations

from typing import Any

from jaxshard.plan.memory_report import BAND

Row = dict[str, Any]

PAGE = """# Estimated and compiled peaks

{count} of the 150 steps that the hash of a commit drew (`{seed}`), the first and the last ones, compiled up to the
assignment of buffers with {versions}.
Made by `python benchmarks/plan.py` and `python benchmarks/plan.py --write docs/records/planner_table.md`.

- **estimate** is the peak in GB per device from the traced step alone (`js.plan.predict` without a compiler).
- **live** are the bytes that are live at once in the compiler's program, **allocated** what it allocates for them, with
  gaps. Of a step that it refuses they are what the step would have needed.
- **error** is the estimate over the live bytes.
- **fits** is what the estimate says (`?`: ask the compiler), and the compiler.

**{compared} steps compared: median error {median:.1%}, 90 % are within {p90:.1%}, worst {worst[0]:+.0%} and
{worst[1]:+.0%}. {within_band:.0%} of the steps are allocated within the band that a prediction
states ({band}). {refused} were refused; the estimate called {wrong} steps fitting that do not fit.**

One such estimate:

```python
import jax
import jax.numpy as jnp
import optax

import jaxshard as js

model, tx = js.models.make("gpt2", depth=4), optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
layout = js.layout(js.ddp(), js.plan.planned_mesh("v5e:4x4", data=16), model.init, tx)
batch = {{"tokens": jax.ShapeDtypeStruct((64, 1025), jnp.int32)}}
estimate = js.plan.predict(layout, model.loss, batch, js.explicit(), tx=tx, estimate=True)
print(estimate.judged_by, f"{{estimate.live_bytes / 1e9:.1f}} GB")
```

```text
estimate 3.1 GB
```

The errors, each # a step:

```text
{histogram}
```

{table}
"""

COLUMNS = (
    "", "model", "chips", "mesh", "strategy, engine, remat", "dtype", "rows", "estimate", "live", "allocated", "error",
    "fits",
)  # fmt: skip


def page(record: Row, summary: Row) -> str:
    """Return the page as Markdown."""
    rows = record["rows"]
    table = [
        "| " + " | ".join(COLUMNS) + " |",
        "|---:|---|---|---|---|---|---|---:|---:|---:|---:|---|",
        *(_line(number, row) for number, row in enumerate(rows, 1)),
    ]
    return PAGE.format(
        **summary,
        band=f"{1 + BAND[0]:.1f} to {1 + BAND[1]:.1f} times the estimate",
        count=len(rows),
        seed=record["seed"][:12],
        versions=", ".join(f"{name} {number}" for name, number in record["versions"].items()),
        wrong=len(summary["wrongly_fits"]),
        histogram=histogram([row["estimate"] / row["peak"] - 1 for row in rows if _is_compared(row)]),
        table="\n".join(table),
    )


def histogram(errors: list[float], width: int = 10) -> str:
    """Draw the number of errors in each bin of so many percent."""
    places = [round(100 * error / width) for error in errors]
    bins = range(min(places), max(places) + 1)
    return "\n".join(f"{place * width:+4d} %  {'#' * places.count(place)}".rstrip() for place in bins)


def _is_compared(row: Row) -> bool:
    return bool(row.get("peak") and row.get("estimate"))


def _line(number: int, row: Row) -> str:
    case = row["case"]
    change = "".join(f" {name}={value}" for name, value in case["change"].items())
    parts = f" x{case['microbatches']}" if case["microbatches"] > 1 else ""
    estimated = {True: "yes", False: "no", None: "?"}[row.get("estimate_fits")]
    compiled = "no" if row.get("refused") else "yes" if row.get("peak") else "not compiled"
    columns = (
        str(number),
        case["model"] + change,
        case["topology"],
        " ".join(f"{axis}={size}" for axis, size in case["axes"].items()),
        f"{case['strategy']}, {case['engine']}, {case['remat']}",
        case["precision"],
        f"{case['rows']} x {case['seq'] or 'image'}{parts}",
        *(f"{row[key] / 1e9:.2f}" if row.get(key) else "" for key in ("estimate", "peak", "allocated")),
        f"{row['estimate'] / row['peak'] - 1:+.1%}" if _is_compared(row) else "",
        f"{estimated} / {compiled}",
    )
    return "| " + " | ".join(columns) + " |"
