"""Times of collectives against quotients made by hand, on planned meshes."""

import numpy as np
import pytest
from jax.sharding import Mesh

from jaxshard.checks.collectives.expected import Expected
from jaxshard.checks.collectives.promise import Promise
from jaxshard.compiler.planned import planned_mesh
from jaxshard.cost.hardware import chip
from jaxshard.plan.time.network import (
    EFFICIENCY,
    Group,
    collective_cost,
    collective_costs,
    collective_seconds,
    group_of,
)

V5E, V5P, H100 = (chip(kind) for kind in ("TPU v5e", "TPU v5p", "NVIDIA H100 80GB HBM3"))


def best(kind, size, group, network):
    """The time without latency, with links at their full bandwidth."""
    quiet = network._replace(latency=0.0, outside_latency=0.0)
    low, _ = collective_seconds(kind, size, group, quiet)
    return low * EFFICIENCY[network.outside if group.outside > 1 else network.inside][0]


@pytest.mark.parametrize(
    ("kind", "inside", "seconds"),
    [
        # 1.6 GB over a ring of 16: 15/16 of it through two links of 50 GB/s; a line has one link at its ends.
        ("all-gather", ((16, True),), 1.5 / 100),
        ("all-gather", ((16, False),), 1.5 / 50),
        ("reduce-scatter", ((16, True),), 1.5 / 100),
        ("all-reduce", ((16, True),), 3.0 / 100),
        # Over 16 x 16 rings four links work: 255/256 of 1.6 GB.
        ("all-gather", ((16, True), (16, True)), 1.6 * 255 / 256 / 200),
        ("all-gather", ((2, False), (4, False)), 1.4 / 100),
        # 0.1 GB each on a ring of 16, 1.6 in all: a quarter of it crosses the middle each way, over two links.
        ("all-to-all", ((16, True),), 0.1 * 16 / 8 / 50 * 16),
        ("collective-permute", ((16, True),), 1.6 / 50),
    ],
)
def test_inside_a_slice(kind, inside, seconds):
    assert best(kind, 1.6e9, Group(inside, 1), V5E.network) == pytest.approx(seconds)


def test_over_slices():
    # 256 devices of each of 4 slices sum 25.6 GB: 0.1 GB each, twice 3/4 of it through a port of 3.125 GB/s.
    group = Group(((16, True), (16, True)), 4)
    assert best("all-reduce", 25.6e9, group, V5E.network) == pytest.approx(2 * 25.6 * 255 / 256 / 200)
    assert best("all-reduce", 0.4e9, Group((), 4), V5E.network) == pytest.approx(2 * 0.4 * 0.75 / 3.125)


def test_gpus():
    # 8 GB to 8 GPUs of an island: 7 GB through 450 GB/s. To 4 islands of 8: 3/4 of 8 GB through 8 ports of 50 GB/s.
    assert best("all-gather", 8e9, Group(((8, True),), 1), H100.network) == pytest.approx(7 / 450)
    low = best("all-gather", 8e9, Group(((8, True),), 4), H100.network)
    assert low == pytest.approx(0.85 * max(8 * 7 / 8 / 450 / 0.78, 8 * 3 / 4 / (8 * 50) / 0.85))


def test_groups_of_axes():
    mesh = planned_mesh("v5e:16x8", x=16, y=8)
    assert group_of(mesh, ("x",), V5E.network) == Group(((16, True),), 1)
    assert group_of(mesh, ("y",), V5E.network) == Group(((8, False),), 1)
    assert group_of(mesh, ("x", "y"), V5E.network) == Group(((16, True), (8, False)), 1)
    # An axis over half of a ring is a line.
    ring = Mesh(mesh.devices[:, 0].reshape(2, 8), ("a", "b"))
    assert group_of(ring, ("b",), V5E.network) == Group(((8, False),), 1)
    cubes = planned_mesh("v5p:4x4x8", x=4, y=4, z=8)
    assert group_of(cubes, ("x", "z"), V5P.network) == Group(((4, True), (8, True)), 1)
    both = group_of(planned_mesh("v5p:2x2x4", data=16), ("data",), V5P.network)
    assert both.inside == ((2, False), (2, False), (4, False))
    pods = planned_mesh("v5e:16x16", num_slices=4, data=4, fsdp=256)
    assert group_of(pods, ("data",), V5E.network) == Group((), 4)
    assert group_of(pods, ("fsdp",), V5E.network) == Group(((16, True), (16, True)), 1)
    assert group_of(pods, ("data", "fsdp"), V5E.network).outside == 4


def test_bytes_that_come_into_a_device():
    mesh = planned_mesh("v5e:16x8", x=16, y=8)
    cost = collective_cost("all-reduce", ("x",), 1600, mesh, V5E, count=3, what="gradient of w")
    assert (cost.bytes, cost.array_bytes, cost.link, cost.count) == (3 * 2 * 1500, 4800, "ici", 3)
    assert collective_cost("all-gather", ("x",), 1600, mesh, None).seconds == (0.0, 0.0)


def test_of_a_compilers_choices_those_of_the_layout_count():
    mesh = planned_mesh("v5e:4x4", x=4, y=4)

    def may(kind, axes, shape, what, **more):
        return Expected(kind, axes, shape, np.float32, 0, 2, what, **more)

    promised = Promise(
        (
            may("all-gather", ("x", "y"), (16, 16), "weight w"),
            # A gradient may be scattered axis by axis or at once, around a ring, or summed.
            may("reduce-scatter", ("x",), (16, 16), "gradient of w"),
            may("reduce-scatter", ("y",), (4, 16), "gradient of w"),
            may("reduce-scatter", ("x", "y"), (16, 16), "gradient of w", instead_of="gradient of w"),
            may("collective-permute", ("x",), (4, 16), "shards, around a ring", instead_of="gradient of w"),
            may("all-reduce", ("x", "y"), (16, 16), "gradient of w", instead_of="gradient of w"),
            may("all-reduce", ("x",), None, "activations"),
            may("all-reduce", ("x", "y"), (8,), "sums over rows", limit=8),
        ),
        (),
        0,
    )
    found = collective_costs(promised, mesh, V5E)
    assert [(one.kind, one.axes, one.array_bytes) for one in found] == [
        ("all-gather", ("x", "y"), 2 * 1024),
        ("reduce-scatter", ("x",), 2 * 1024),
        ("reduce-scatter", ("y",), 2 * 256),
    ]


def test_between_slices_each_array_counts_once():
    pods = planned_mesh("v5e:4x4", num_slices=2, data=2, fsdp=16)

    def pooled(what):
        for kind in ("all-reduce", "reduce-scatter", "all-gather"):
            for axes in (("data",), ("fsdp",)):
                yield Expected(kind, axes, (16, 128), np.float32, 0, 1, what, pooled=True)

    def kinds(*whats):
        promised = Promise(tuple(one for what in whats for one in pooled(what)), (), 0)
        return [(one.kind, one.axes, one.count) for one in collective_costs(promised, pods, V5E)]

    both = ("data", "fsdp")
    assert kinds("gradient of w") == [("all-reduce", both, 1)]
    assert kinds("weight w", "gradient of w") == [("all-gather", both, 1), ("reduce-scatter", both, 1)]
