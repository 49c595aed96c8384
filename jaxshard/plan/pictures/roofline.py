"""Draw the roofline of a step: the speed that each product can reach by the chip's arithmetic and by its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxshard.core.pictures.canvas import drawing
from jaxshard.core.pictures.style import GREY, PALETTE, WIDTH, Look
from jaxshard.cost.hardware import Chip
from jaxshard.plan.prediction import Prediction
from jaxshard.plan.time.products import ProductCost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMED = 6
"""The largest number of products that are named; the others are grey."""
_SEEN = 0.002
"""The smallest product that is drawn, as a share of a step's FLOPs."""

_WORDS = 30
"""The number of letters of a product's operands that are shown."""

_MARKERS = "osD^vP"


def roofline_figure(prediction: Prediction, *, title: str = "") -> Figure:
    """Draw the roofline of a step: every matrix product by its FLOPs for each byte of memory, under the chip's roof.

    Products of less than a five-hundredth of the FLOPs are left out. A product left of the roof's ridge waits for
    memory, a product right of the ridge for arithmetic. The area of a mark is the product's share of the FLOPs.

    Args:
      prediction: a prediction of `js.plan.predict` with `estimate=True`, for a known chip.
      title: the title; by default the chip.

    Returns:
      The matplotlib figure.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the prediction has no chip, or no products.

    Example:
        mesh = js.plan.planned_mesh("v5e:2x4", data=8)
        prediction = js.plan.predict(js.layout(js.fsdp(), mesh, init_fn, tx), loss_fn, batch, tx=tx, estimate=True)
        js.plan.roofline_figure(prediction).savefig("roofline.svg")
    """
    chip = prediction.chip
    total = sum(one.flops for one in prediction.products)
    products = [one for one in prediction.products if one.bytes > 0 and one.flops > _SEEN * total]
    if chip is None or not products:
        lacks = "products" if chip is not None else "chip: predict with chip=, or on the mesh of a topology"
        raise ValueError(f"roofline_figure: the prediction has no {lacks}")
    with drawing(WIDTH, 7) as (figure, look):
        axes = figure.subplots()
        axes.grid(axis="both")
        _draw_roofs(axes, chip, products, look)
        _draw_products(axes, chip, products, look)
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        axes.set_xlabel("FLOPs for each byte of memory")
        axes.set_ylabel("TFLOP/s at most")
        figure.suptitle(title or f"{chip.name}: products of a step, area by FLOPs", x=0.01, ha="left")
        figure.legend(loc="outside lower left", labelspacing=0.7)
    return figure


def _draw_roofs(axes: Any, chip: Chip, products: Sequence[ProductCost], look: Look) -> None:
    """Draw the slope of the memory, and a flat roof for each dtype of the products."""
    intensities = [one.flops / one.bytes for one in products]
    ridge = chip.peak_flops / chip.hbm_bandwidth
    low, high = min(*intensities, ridge) / 8, max(*intensities, ridge) * 6
    roofs = {chip.rate(one.dtype): one.dtype for one in products}
    top = max(roofs)
    for rate, dtype in roofs.items():
        start = rate / chip.hbm_bandwidth
        axes.plot([start, high], [rate / 1e12] * 2, color=look.ink, linewidth=2)
        axes.text(high, rate / 1e12 * 1.1, f"{rate / 1e12:.4g} TFLOP/s {dtype} ", ha="right", va="bottom")
    slope = [low * chip.hbm_bandwidth / 1e12, top / 1e12]
    axes.plot([low, top / chip.hbm_bandwidth], slope, color=look.ink, linewidth=2)
    label = f"memory: {chip.hbm_bandwidth / 1e9:.4g} GB/s"
    axes.text(low * 1.2, slope[0], label, va="bottom")


def _draw_products(axes: Any, chip: Chip, products: Sequence[ProductCost], look: Look) -> None:
    total = sum(one.flops for one in products)
    for number, one in enumerate(sorted(products, key=lambda one: -one.flops)):
        intensity = one.flops / one.bytes
        rate = min(chip.rate(one.dtype), intensity * chip.hbm_bandwidth) / 1e12
        named = number < _NAMED
        shapes = one.shapes if len(one.shapes) <= _WORDS else f"{one.shapes[:_WORDS]} ..."
        label = f"{one.flops / total:.0%} of the FLOPs: {one.where}, {one.count:,} times {shapes}" if named else None
        axes.scatter(
            intensity, rate, s=60 + 1200 * one.flops / total, color=PALETTE[number] if named else GREY,
            marker=_MARKERS[number % len(_MARKERS)] if named else ".", edgecolor=look.paper, linewidth=0.8, alpha=0.85,
            label=label, zorder=3,
        )  # fmt: skip
