"""Tables, bars and marks as HTML for notebooks, which needs no other package, script or file.

Text and lines take the colours of the page around them: JupyterLab's and Furo's by their variables, elsewhere those
that are inherited. So they are right on light and dark pages, also where a page does not follow the system. The colours
of bars are seen on both. What a page cannot do without, its bars, marks and the sides of its cells, stands in the
elements themselves: viewers take the `<style>` away from notebooks that they do not trust.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from jaxshard.core.pictures.boxes import Box, drawing, row, under_limit
from jaxshard.core.pictures.style import GREEN, GREY, ORANGE, VERMILLION
from jaxshard.core.text_table import Section, Table

GOOD, BAD, UNSURE = GREEN, VERMILLION, ORANGE
"""The colours of verdicts. The word beside them says it too."""

# The selector names the class three times to win over the style sheets of JupyterLab and of Sphinx's themes, which
# colour every other row of a table and align its cells to the right; JupyterLab's rule for rows takes `important`.
_STYLE = """<style>
.jaxshard{color:var(--jp-content-font-color1,var(--color-foreground-primary,inherit));line-height:1.45;overflow-x:auto;
--jaxshard-line:var(--jp-border-color1,var(--color-background-border,rgba(128,128,128,.4)))}
.jaxshard.jaxshard.jaxshard table{border-collapse:collapse;margin:.3em 0 .8em;color:inherit;font-size:.88em;width:auto;
table-layout:auto;border:0}
.jaxshard.jaxshard.jaxshard tr{background:transparent!important;color:inherit;border:0}
.jaxshard.jaxshard.jaxshard :is(td,th){padding:.18em .9em .18em 0;text-align:left;vertical-align:top;color:inherit;
border:0;border-bottom:1px solid var(--jaxshard-line);max-width:48em;white-space:normal;background:transparent}
.jaxshard.jaxshard.jaxshard th{font-weight:600;white-space:nowrap}
.jaxshard.jaxshard.jaxshard [align=right]{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.jaxshard p{margin:.25em 0}
.jaxshard .js-title{margin:.7em 0 .1em}
.jaxshard ul,.jaxshard ol{margin:.2em 0 .8em;padding-left:1.6em}
.jaxshard li{font-size:.92em;margin:.15em 0}
.jaxshard pre{white-space:pre-wrap;margin:.1em 0 .4em;padding:0;background:transparent;color:inherit;font-size:.9em}
.jaxshard details{margin:.3em 0 .6em}
.jaxshard summary{cursor:pointer}
</style>"""


def page(*parts: str) -> str:
    """Put parts, made by the other functions of this file, into one page with its style."""
    return f'<div class="jaxshard" style="overflow-x:auto">{_STYLE}{"".join(parts)}</div>'


def paragraph(text: str) -> str:
    """Write a line of text."""
    return f"<p>{html.escape(text)}</p>"


def title(text: str) -> str:
    """Write the title of what comes next."""
    return f'<p class="js-title" style="font-weight:600">{html.escape(text)}</p>'


def verdict(ok: bool | None, text: str) -> str:
    """Write a line with a mark: good, bad, or unsure for None."""
    colour = {True: GOOD, False: BAD, None: UNSURE}[ok]
    return f'<p class="js-title" style="font-weight:600">{mark(colour)}{html.escape(text)}</p>'


def mark(colour: str) -> str:
    """Draw a small square of a colour, as legends have them."""
    square = "display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:5px"
    return f'<span style="{square};background:{colour}"></span>'


def legend(colours: Mapping[str, str]) -> str:
    """Write names with their colours in one line."""
    return f"<p>{' &nbsp; '.join(mark(colour) + html.escape(name) for name, colour in colours.items())}</p>"


def table(of: Table, *, marks: Mapping[str, str] | None = None, last: Sequence[str] = ()) -> str:
    """Write a table; numbers, the columns of the side ">", are right-aligned.

    Args:
      of: the table.
      marks: colours, by the text in the first cell of a row, of a mark in front of it.
      last: HTML for a further cell of each row, such as drawings.
    """
    marks = marks or {}
    rows = []
    for number, cells in enumerate(of.rows):
        colour = marks.get(cells[0].strip()) if cells else None
        drawn = f"<td>{last[number]}</td>" if last else ""
        rows.append(f"<tr>{_cells(cells, of.sides, 'td', mark(colour) if colour else '')}{drawn}</tr>")
    extra = "<th></th>" if last else ""
    head = f"<thead><tr>{_cells(of.head, of.sides, 'th')}{extra}</tr></thead>" if of.head else ""
    return f"<table>{head}<tbody>{''.join(rows)}</tbody></table>"


def _cells(cells: Sequence[str], sides: str, tag: str, before: str = "") -> str:
    written = []
    for number, (cell, side) in enumerate(zip(cells, sides or "<" * len(cells), strict=True)):
        kind = 'align="right"' if side == ">" else 'style="text-align:left"'  # JupyterLab's rule is the right side
        written.append(f"<{tag} {kind}>{'' if number else before}{html.escape(cell)}</{tag}>")
    return "".join(written)


def listing(entries: Iterable[str], *, ordered: bool = False) -> str:
    """Write entries as a list; the lines of an entry stay lines. Nothing without entries."""
    items = "".join(f"<li>{html.escape(entry)}</li>" for entry in entries)
    tag = "ol" if ordered else "ul"
    return f'<{tag} style="white-space:pre-wrap">{items}</{tag}>' if items else ""


def preformatted(text: str) -> str:
    """Write text whose lines and spaces stay as they are. Nothing without text."""
    return f"<pre>{html.escape(text)}</pre>" if text else ""


def folded(summary: str, *parts: str) -> str:
    """Put parts behind a line that opens them."""
    return f"<details><summary>{html.escape(summary)}</summary>{''.join(parts)}</details>"


def sections(found: Iterable[Section], *, marks: Mapping[str, str] | None = None) -> str:
    """Write the sections of a report, each with its title."""
    written = []
    for one in found:
        written.append(title(one.title) if one.title else "")
        written += [table(part, marks=marks) if isinstance(part, Table) else paragraph(part) for part in one.parts]
    return "".join(written)


_BAR_WIDTH, _BAR_HEIGHT = 620, 24
_SMALL = 0.05
"""The share of a limit below which its line would only make a bar too short to be read."""


def bar(
    parts: Mapping[str, tuple[float, str]],
    colours: Mapping[str, str],
    *,
    limit: tuple[float, str] | None = None,
    whole: float = 0.0,
    width: int = _BAR_WIDTH,
    height: int = _BAR_HEIGHT,
) -> str:
    """Draw parts side by side in one bar, and the line of a limit.

    Args:
      parts: by name their size, and the same in words, which stand in the parts that are wide enough.
      colours: by name.
      limit: a size, and what stands beside its line; left out where all parts together are a small share of it.
      whole: the size of the whole width, for bars that are compared; by default the larger of parts and limit.
      width: pixels.
      height: pixels; low bars have no words.
    """
    total = sum(size for size, _ in parts.values())
    limit = limit if limit and total >= _SMALL * limit[0] else None
    whole = max(whole, total, limit[0] if limit else 0.0) or 1.0
    boxes, left = [], 0.0
    for name, (size, words) in parts.items():
        if size <= 0:
            continue
        wide = size / whole * width
        shown = words if height >= _BAR_HEIGHT and wide > 7.5 * len(words) + 6 else ""
        boxes.append(Box(left, left + wide, colours.get(name, GREY), shown, f"{name}: {words}"))
        left += wide
    drawn = row(boxes, width=width, height=height, font=13)
    if limit:
        drawn = under_limit(drawn, limit[0] / whole * (width - 2), limit[1], width=width)
    return drawing(drawn)
