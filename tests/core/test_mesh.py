"""Meshes: sizes solved, devices counted, axis types Auto, errors that name both numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from jax.sharding import AxisType

import jaxshard as js


def test_all_devices_in_row_major_order_with_auto_axes():
    mesh = js.make_mesh(data=4, tensor=2)
    assert mesh.axis_names == ("data", "tensor") and dict(mesh.shape) == {"data": 4, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert [d.id for d in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 3}, "data=3 needs 3 devices, but there are 8; set one size to -1"),
        ({"data": 16}, r"needs 16 devices, but there are 8.*js.simulate_devices\(16\)"),
        ({"data": 4, "tensor": 4}, "data=4, tensor=4 needs 16 devices, but there are 8"),
        ({"data": -1, "tensor": 3}, "8 devices are not divisible by 3"),
        ({"data": -1, "tensor": 16}, "8 devices are not divisible by 16"),
        ({"data": -1, "tensor": -1}, "at most one of them -1; got data=-1, tensor=-1"),
        ({"data": 0}, "at least 1.*got data=0"),
        ({"data": -2}, "at least 1.*got data=-2"),
        ({}, "name at least one axis, such as data=-1, for the 8 devices"),
    ],
)
def test_sizes_that_do_not_fit_the_devices(axes, message):
    with pytest.raises(ValueError, match=message):
        js.make_mesh(**axes)


@pytest.mark.parametrize("size", [2.0, "2", None])
def test_a_size_that_is_no_whole_number(size):
    with pytest.raises(TypeError, match=f"must be a whole number, got data={size!r}"):
        js.make_mesh(data=size)


def test_simulating_devices_after_the_start():
    js.simulate_devices(8)  # as it is: nothing to do
    with pytest.raises(RuntimeError, match=r"simulate_devices\(4\): JAX already runs on 8 cpu device.*at the top"):
        js.simulate_devices(4)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        js.simulate_devices(0)


def test_simulating_devices_at_the_start():
    code = "import jaxshard as js; js.simulate_devices(3); print(js.make_mesh(data=-1).shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "3" in done.stdout
