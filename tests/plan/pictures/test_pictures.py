"""Pictures of plans: what they show, which files they become, and what they refuse."""

import jax
import optax
import pytest

import jaxshard as js
from jaxshard.checks.programs.live import LiveArray
from jaxshard.core.pictures.tiles import parts_held
from jaxshard.cost.hardware import chip
from jaxshard.plan.pictures.memory import memory_figure
from jaxshard.plan.pictures.roofline import roofline_figure
from jaxshard.plan.pictures.tiles import sharding_figure
from jaxshard.plan.prediction import Prediction
from jaxshard.plan.time.products import ProductCost

V5E = chip("TPU v5e")
PRODUCTS = (
    ProductCost("model.py:7", "[4096, 1024] x [1024, 4096]", "bfloat16", 24, 8e11, 1e9, 0.1, (0.1, 0.2)),
    ProductCost("model.py:9", "[8, 1024] x [1024, 8]", "bfloat16", 2, 2e11, 4e9, 0.1, (0.1, 0.2)),
    ProductCost("model.py:3", "[2] x [2]", "float32", 1, 8.0, 16.0, 0.0, (0.0, 0.0)),
)


def prediction(gigabytes, **fields):
    arrays = tuple(LiveArray(int(size * 1e9), role, "bf16", (), 1, "") for role, size in gigabytes.items())
    return Prediction(
        mesh={"data": 8}, chip=V5E, judged_by="estimate", live_bytes=sum(one.bytes for one in arrays),
        allocated_bytes=None, argument_bytes=0, arrays=arrays, usable_bytes=16_900_000_000, **fields,
    )  # fmt: skip


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_memory_is_stacked_by_role_with_totals_and_the_limit():
    ddp, fsdp = prediction({"parameters": 8, "optimizer state": 20}), prediction({"parameters": 1, "temporaries": 2})
    figure = memory_figure({"ddp": ddp, "fsdp": fsdp})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ddp", "fsdp"]
    widths = {(round(bar.get_y()), bar.get_x()): bar.get_width() for bar in axes.patches if bar.get_width()}
    assert widths == {(0, 0.0): 8.0, (0, 8.0): 20.0, (1, 0.0): 1.0, (1, 1.0): 2.0}
    assert {" 28 GB, does not fit", " 3 GB, fits", "8", "20"} <= set(texts(figure))
    assert axes.get_title(loc="right") == "usable: 16.90 GB"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["parameters", "optimizer state", "temporaries"]


def test_of_layouts_what_rests_is_drawn_in_the_unit_that_fits():
    layout = make_layout(js.zero2("data"), data=8)
    figure = memory_figure({"zero2": layout})
    (axes,) = figure.axes
    widths = [bar.get_width() for bar in axes.patches if bar.get_width()]
    assert widths == pytest.approx([layout.bytes_per_device()[role] / 1e3 for role in ("param", "grad", "opt")])
    assert axes.get_xlabel() == "kB on each device between steps" and texts(figure)[-1] == " 369 kB"


def test_the_roofline_has_a_marker_for_each_product_that_counts():
    figure = roofline_figure(prediction({}, products=PRODUCTS))
    (axes,) = figure.axes
    points = [tuple(points.get_offsets()[0]) for points in axes.collections]
    rate, bandwidth = V5E.peak_flops, V5E.hbm_bandwidth
    assert points == [(800.0, rate / 1e12), (50.0, 50 * bandwidth / 1e12)]  # the third has 8 of 1e12 FLOPs
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text() == ("80% of the FLOPs: model.py:7, 24 times [4096, 1024] x [1024, 4096]")


def test_a_prediction_without_products_or_chip_has_no_roofline():
    with pytest.raises(ValueError, match="the prediction has no products"):
        roofline_figure(prediction({}))


def make_layout(strategy, **axes):
    mesh = js.make_mesh(**axes)

    def init(key):
        return {"w": jax.numpy.zeros((64, 512)), "same": jax.numpy.zeros((64, 512)), "bias": jax.numpy.zeros(512)}

    return js.layout(strategy, mesh, init, optax.adam(1e-3))


@pytest.mark.slow
def test_tiles_show_which_part_each_device_holds():
    layout = make_layout(js.zero2("data"), data=8)
    assert parts_held(layout.mesh, layout.params["w"]).tolist() == [0] * 8
    assert parts_held(layout.mesh, layout.grads["w"]).tolist() == list(range(8))
    figure = sharding_figure(layout)
    assert [axes.get_title() for axes in figure.axes[:3]] == ["parameter", "gradient", "optimizer state"]
    assert len(figure.axes) == 6  # `same` rests like `w`
    assert figure.axes[0].get_ylabel() == "same and 1 more\n[64, 512], 131.07 kB"
    assert [axes.get_xlabel() for axes in figure.axes[:2]] == ["replicated", "1/8 on each:\n[8, 512]"]
