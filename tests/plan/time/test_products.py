"""FLOPs and bytes by product against numbers made by hand, on each device of a mesh."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.cost.hardware import chip
from jaxshard.plan.time.products import EFFICIENCY, product_costs, product_seconds


def costs(fn, *args, mesh, **options):
    return product_costs(jax.make_jaxpr(fn)(*args), mesh, **options)


def test_products_of_one_device():
    mesh = js.make_mesh(data=4, tensor=2)
    x, w = jnp.zeros((64, 32), jnp.bfloat16), jnp.zeros((32, 16), jnp.bfloat16)

    def body(x, w):
        def turn(x, _):
            return jnp.tanh(x @ w @ w.T), None

        return jax.lax.scan(turn, x, None, length=3)[0]

    # Manual over data, where a device has 16 rows; the two devices of tensor are the compiler's to use.
    spread = jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"},
                           check_vma=False)  # fmt: skip
    first, second = costs(spread, x, w, mesh=mesh)
    assert (first.count, first.flops, second.flops) == (3, 3 * 2 * 16 * 32 * 16 / 2, 3 * 2 * 16 * 32 * 16 / 2)
    assert first.bytes == 3 * 2 * (16 * 32 + 32 * 16 + 16 * 16) / 2
    assert first.where.startswith("test_products.py:")
    (alone, _) = costs(spread, x, w, mesh=mesh, parts=lambda equation, axes: 1)
    assert alone.flops == 2 * first.flops
    # Left to the compiler all eight devices share the work.
    (whole,) = costs(lambda x, w: x @ w, x, w, mesh=mesh)
    assert whole.flops == 2 * 64 * 32 * 16 / 8


def test_recomputation_counts():
    mesh = js.make_mesh(data=8)
    x, w = jnp.zeros((64, 32)), jnp.zeros((32, 32))

    def loss(w):
        return jax.checkpoint(lambda w: jnp.sin(x @ w) @ w)(w).sum()

    # Forward, once more, and two for each in the backward pass; of the recomputed one only the first is needed.
    total = sum(one.flops for one in costs(jax.grad(loss), w, mesh=mesh))
    assert total == (2 + 1 + 3) * 2 * 64 * 32 * 32 / 8


def test_rooflines():
    v6e = chip("TPU v6e")
    best, worst = EFFICIENCY[256]
    low, high = product_seconds(v6e, 918e12, 1.0, "bfloat16")
    assert (low, high) == pytest.approx((1 / best, 1 / worst))
    # 128 columns fill half of a unit of 256; 1.64 TB through the memory take a second.
    assert product_seconds(v6e, 918e12, 1.0, "bfloat16", fill=0.5)[0] == pytest.approx(2 / best)
    assert product_seconds(v6e, 1.0, 1640e9, "bfloat16")[0] == pytest.approx(1 / best)
    assert product_seconds(v6e, 918e12, 1.0, "int8")[0] == pytest.approx(0.5 / best)
    assert product_seconds(v6e, 918e12, 1.0, "float32", passes=6)[0] == pytest.approx(6 / best)
