"""The colours and sizes of all pictures and pages, light and dark."""

from __future__ import annotations

from typing import NamedTuple

BLACK, WHITE = "#000000", "#FFFFFF"
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILLION, YELLOW, GREY = "#56B4E9", "#D55E00", "#F0E442", "#666666"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, GREY)
"""Okabe and Ito's colours (jfly.uni-koeln.de/color), which colour-blind people can distinguish, and a grey.

All of them are visible on white and on nearly black, so that light and dark pictures share them.
"""

ROLES = {
    "parameters": BLUE,
    "gradients": VERMILLION,
    "optimizer state": GREEN,
    "model state": GREY,
    "batch": "#7A4A1E",
    "kept activations": ORANGE,
    "gathered weights": SKY,
    "logits": PURPLE,
    "temporaries": YELLOW,
}
"""The colour of each role of memory; the palette has only eight colours, so the batch is brown."""

OPERATIONS = {"F": SKY, "B": ORANGE, "W": GREEN}
"""The colours of the operations of a schedule."""

SIZE = 13
"""The font size in points: legible in a picture of `WIDTH` that is shown at half its size."""

WIDTH = 9.5
"""The width of a picture in inches."""


class Look(NamedTuple):
    """The background, text and line colours of a picture, light or dark.

    Attributes:
      paper: the background.
      ink: the colour of text.
      muted: the colour of axes and less important text.
      faint: the colour of grids.
    """

    paper: str
    ink: str
    muted: str
    faint: str

    @property
    def lines(self) -> tuple[str, ...]:
        """The colours of lines, with the colour of text in place of yellow, which is not visible on white."""
        return tuple(self.ink if colour == YELLOW else colour for colour in PALETTE)


LIGHT = Look("#FFFFFF", "#1F2328", "#656D76", "#DDE0E4")
DARK = Look("#131416", "#E6E8EB", "#9AA0A6", "#34383D")


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour such as "#0072B2", from 0 to 1 (WCAG 2.2)."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink_on(colour: str) -> str:
    """Return black or white, whichever is more legible on a colour."""
    return max(WHITE, BLACK, key=lambda ink: contrast(ink, colour))


def tint(colour: str, part: int, parts: int) -> str:
    """Return a shade of a colour for one of several parts: the last is the colour itself, the first the lightest.

    >>> [tint("#56B4E9", part, 2) for part in range(2)]
    ['#91cef1', '#56b4e9']
    """
    white = 0.7 * (parts - 1 - part) / parts
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(one + (255 - one) * white):02x}" for one in channels)
