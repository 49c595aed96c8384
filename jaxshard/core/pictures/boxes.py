"""Drawings for notebooks made of coloured boxes: bars, schedules and meshes as HTML elements with inline styles.

Viewers that show a notebook without trusting it take away `<style>` and `<svg>`; JupyterLab does so until its cells are
executed. It keeps `<div>` and `<span>` with the properties that stand here (`packages/apputils/src/sanitizer.ts` in
github.com/jupyterlab/jupyterlab). Spaces stand between the boxes, so that their words stay apart where even the styles
are taken away; rows that are flexible boxes do not show them.
"""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import NamedTuple

from jaxshard.core.pictures.style import ink_on

GAP = 2
"""Pixels between the rows of a drawing."""


class Box(NamedTuple):
    """A coloured part of a row.

    Attributes:
      start: where it begins, in pixels from the left of the row.
      end: where it ends.
      colour: such as "#0072B2".
      words: what stands in it, in black or white.
      title: what stands beside the mouse.
    """

    start: float
    end: float
    colour: str
    words: str = ""
    title: str = ""


def row(boxes: Iterable[Box], *, width: int, height: int, font: int, behind: str = "") -> str:
    """Draw boxes, which are given from left to right and do not overlap, in one row.

    Args:
      boxes: of the row.
      width: pixels of the whole row; in a narrower page all boxes shrink.
      height: pixels.
      font: pixels of the words' letters.
      behind: the colour behind the boxes, by default none.
    """
    drawn, at = [], 0.0
    for box in boxes:
        start, end = (round(100 * x / width, 2) for x in (box.start, box.end))
        before = f"margin-left:{start - at:.2f}%;" if start > at else ""
        words = f";color:{ink_on(box.colour)};overflow:hidden" if box.words else ""
        title = f' title="{html.escape(box.title)}"' if box.title else ""
        style = f"{before}width:{end - start:.2f}%;background:{box.colour}{words}"
        drawn.append(f'<span{title} style="{style}">{html.escape(box.words)}</span>')
        at = end
    background = f"background:{behind};" if behind else ""
    style = (
        f"display:flex;width:{width}px;max-width:100%;height:{height}px;margin-bottom:{GAP}px;{background}"
        f"font-size:{font}px;line-height:{height}px;text-align:center;white-space:nowrap"
    )
    return f'<div style="{style}">{" ".join(drawn)}</div>'


def beside(name: str, drawn: str, *, width: int, font: int) -> str:
    """Put a row to the right of its name, which has so many pixels."""
    label = f'<span style="min-width:{width}px;font-size:{font}px;white-space:nowrap">{html.escape(name)}</span>'
    return f'<div style="display:flex">{label} {drawn}</div>'


def under_limit(drawn: str, at: float, words: str, *, width: int) -> str:
    """Draw a dashed line across a row at so many of its pixels, its words above the row."""
    share = 100 * at / width
    side = f"right:{100 - share:.2f}%;padding-right:5px" if share > 50 else f"left:{share:.2f}%;padding-left:7px"
    place = "position:absolute;top:0;white-space:nowrap;font-size:12px;line-height:15px"
    return (
        f'<div style="position:relative;width:{width}px;max-width:100%;padding-top:16px">{drawn} '
        f'<span style="{place};{side}">{html.escape(words)}</span>'
        f'<span style="position:absolute;top:0;bottom:0;left:{share:.2f}%;border-left:2px dashed"></span></div>'
    )


def drawing(*rows: str) -> str:
    """Put rows into one drawing."""
    return f'<div class="js-drawing" style="margin:3px 0">{" ".join(rows)}</div>'
