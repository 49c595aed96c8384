"""The page that `plan.py --write` makes: every case with its predicted and compiled peak, and what it communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = """# Predicted and compiled peaks

Made by `python benchmarks/plan.py --seed {seed} --cases {drawn} --write docs/records/planner_table.md` with {versions}.
{fixed} cases are a list in `benchmarks/plan_cases.py`, {drawn} were drawn by the seed from its whole grid; a slow test
draws others for each commit.

A case is a layout on planned chips and a prediction. The first:

```python
import jax
import optax

import jaxshard as js

tx, model = optax.adamw(1e-3), js.models.make("gpt2", depth=4)
layout = js.layout(js.ddp("data"), js.plan.planned_mesh("v5e:4x4", data=16), model.init, tx)
batch = {{"tokens": jax.ShapeDtypeStruct((4 * 16, 1025), "int32")}}
prediction = js.plan.predict(layout, model.loss, batch, js.explicit(), tx=tx)
print(prediction.fits)
```

```text
True
```

- **predicted** is `js.plan.predict(...).peak.total` in GB per device, from the traced step alone.
- **compiled** is the peak of the compiler's program: its `peak_memory_in_bytes`. Of a step that it refuses it is what
  the program would have held at once, read from the compiler's dump.
- **fits** is what the prediction says (`?`: compile to know), and the compiler. A GPU's compiler refuses nothing.
- **moved** are the bytes of the arrays in collectives per device and step, as promised by the layout and as found in
  the program. The notes say which kinds stand for which.

{summary}
"""

COLUMNS = (
    "", "model", "chips", "mesh", "strategy, engine, remat", "dtype", "rows", "predicted", "compiled", "error", "fits",
    "moved, promised", "found", "notes",
)  # fmt: skip

NOTES = """
## Notes on collectives

One line for each way in which compilers leave the promise, with the cases in which it happens.

{notes}
"""


def page(
    rows: Sequence[dict[str, Any]], summary: dict[str, Any], versions: dict[str, str], fixed: int, seed: str
) -> str:
    """The whole page as Markdown."""
    head = HEAD.format(
        seed=seed,
        fixed=min(fixed, len(rows)),
        drawn=max(0, len(rows) - fixed),
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        summary=_summary(summary),
    )
    notes = _Notes()
    lines = [
        "| " + " | ".join(COLUMNS) + " |",
        "|---:|---|---|---|---|---|---|---:|---:|---:|---|---:|---:|---|",
        *(_line(number, row, notes) for number, row in enumerate(rows, 1)),
    ]
    return head + "\n" + "\n".join(lines) + "\n" + NOTES.format(notes=notes.listed())


def updated(text: str, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> str:
    """A page with the predictions of today in place of its own; what was compiled stays."""
    head, start, table = text.partition("| " + " | ".join(COLUMNS))
    lines = table.splitlines(keepends=True)
    cells = {at: line.split(" | ") for at, line in enumerate(lines) if line.count(" | ") == len(COLUMNS) - 1}
    places = {tuple(found[1:7]): at for at, found in cells.items()}
    for row in rows:
        new = _line(0, row, _Notes()).split(" | ")
        at = places.get(tuple(new[1:7]))
        if at is None or (old := cells[at])[8] != new[8]:
            raise ValueError(f"{row['name']} is not on the page with {new[8] or 'no'} GB compiled: write it anew")
        lines[at] = " | ".join([*old[:7], new[7], old[8], *new[9:11], *old[11:]])
    head = head[: head.index("\n**")] + "\n" + _summary(summary | {"cases": len(places)}) + "\n\n"
    return head + start + "".join(lines)


REASONS: dict[str, str] = {}
"""What the compiler does otherwise in cases that are too far off, as its dumps show."""


def _summary(summary: dict[str, Any]) -> str:
    over = "\n".join(
        f"  - {name}: {error:+.1%}" + (f"; {REASONS[name]}" if name in REASONS else "")
        for name, error in summary["over"].items()
    )
    return (
        f"**{summary['compared']} of {summary['cases']} cases compared: median error {summary['median']:.1%}, worst "
        f"{summary['worst']:.1%}; {len(summary['refused'])} refused by the compiler, of which the prediction called "
        f"{len(summary['wrongly_fits'])} fitting.**\n"
        + (f"\nMore than 15 % off, to be mended:\n\n{over}\n" if over else "")
    )


class _Notes:
    """Explanations by letter, each with the cases that it is true of."""

    def __init__(self) -> None:
        self.cases: dict[str, list[int]] = {}

    def add(self, words: str, case: int) -> str:
        self.cases.setdefault(words, [])
        if case not in self.cases[words]:
            self.cases[words].append(case)
        return _letter(list(self.cases).index(words))

    def listed(self) -> str:
        return "\n".join(
            f"- **{_letter(index)}** {words}: cases {', '.join(map(str, cases))}"
            for index, (words, cases) in enumerate(self.cases.items())
        )


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else chr(ord("a") + index // 26 - 1) + chr(ord("a") + index % 26)


def _line(number: int, row: dict[str, Any], notes: _Notes) -> str:
    case = row["case"]
    change = "".join(f" {name}={value}" for name, value in case["change"].items())
    turns = f" x{case['microbatches']}" if case["microbatches"] > 1 else ""
    error = ""
    if row.get("peak") and row.get("predicted_peak"):
        error = f"{row['predicted_peak'] / row['peak'] - 1:+.1%}"
    fits = {True: "yes", False: "no", None: "?"}
    compiled_fits = "no" if row.get("refused") else "yes" if row.get("peak") else "not compiled"
    promised, found = row.get("promised_bytes"), row.get("found_bytes")
    letters = sorted({notes.add(words, number) for words in _reasons(row)}, key=lambda one: (len(one), one))
    columns = (
        str(number),
        case["model"] + change,
        case["topology"],
        " ".join(f"{axis}={size}" for axis, size in case["axes"].items()),
        f"{case['strategy']}, {case['engine']}, {case['remat']}",
        case["precision"],
        f"{case['rows']} x {case['seq'] or 'image'}{turns}",
        _gigabytes(row.get("predicted_peak")),
        _gigabytes(row.get("peak")),
        error,
        f"{fits[row.get('predicted_fits')]} / {compiled_fits}",
        _gigabytes(promised),
        _gigabytes(found),
        " ".join(letters),
    )
    return "| " + " | ".join(columns) + " |"


def _reasons(row: dict[str, Any]) -> list[str]:
    """Why the collectives are not those of the promise, without numbers of one case."""
    if "substitutes" not in row:
        return []
    found = [words.split("\n")[0].split(", ")[0] for words in row.get("substitutes", ())]
    found += [f"not promised: {words.split(',')[0]}" for words in row.get("surprises", ())]
    found += [f"less often than promised: {words.split(' of ')[0]}" for words in row.get("missing", ())]
    if any(entry["promised"] is None for entry in row.get("collectives", ())):
        found.append("activations over a tensor axis and sums of the loss have no promised size")
    if row.get("tolerated"):
        found.append("small borders and indices, left to the compiler")
    return found


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e9:.2f}"
