"""How long copies to a host's memory keep a device waiting, beside products and without."""

import jax.numpy as jnp
import pytest

import jaxshard as js
from jaxshard.plan.memory.graph import Op, Region, Value
from jaxshard.plan.time.offload import Offload, offload_of, offload_seconds, offload_traffic

CHIP = js.plan.chip("TPU v5e")._replace(host_bandwidth=1e9)


def test_copies_beside_products_cost_what_these_do_not_cover():
    moved = Offload(2 * 10**9, 2 * 10**9)  # two seconds each way
    assert offload_seconds(moved, CHIP, 8.0) == 0  # two of them are the forward pass
    assert offload_seconds(moved, CHIP, 4.0) == pytest.approx(1)  # the way out alone takes longer than one
    assert offload_seconds(moved, CHIP, 0.0) == pytest.approx(4)


def test_layouts_for_the_host_are_made_in_the_devices_memory():
    low, high = offload_traffic(Offload(10**9, 10**9), CHIP)
    assert (low, high) == (pytest.approx(24e9 / CHIP.hbm_bandwidth), pytest.approx(34e9 / CHIP.hbm_bandwidth))


def test_a_loop_moves_what_its_body_does_in_every_turn():
    here, there = (Value((8, 4), jnp.bfloat16, ((), ()), (2, 4), on_host=on_host) for on_host in (False, True))
    put = Op("device_put", [here], [there])
    back = Op("device_put", [there], [here])
    same = Op("device_put", [here], [here])
    loop = Op("scan", [], [], regions=[Region([], [put, put, same])], params={"length": 3})
    assert offload_of(Region([], [loop, back])) == Offload(3 * 2 * 16, 16)
