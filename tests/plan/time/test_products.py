"""FLOPs and bytes by product against numbers made by hand, on each device of a mesh."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxshard as js
from jaxshard.adapt.remat import policy_function
from jaxshard.core.constrain import follow_layout
from jaxshard.cost.hardware import chip
from jaxshard.plan.memory.graph import build
from jaxshard.plan.time.products import TRAFFIC, compute_seconds, product_costs


def costs(fn, *args, mesh, splits=None, **options):
    """Products of a function whose arguments are split over mesh axes by `splits`, else replicated."""
    program = jax.make_jaxpr(fn)(*args)
    splits = splits or [((),) * var.aval.ndim for var in program.jaxpr.invars]
    region = build(program, [(split, "", "") for split in splits], mesh.shape)
    return product_costs(region, program, **options)


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
    over_tensor = [((), ()), ((), ("tensor",))]  # of w the columns: each device has 8 of 16
    first, second = costs(spread, x, w, mesh=mesh, splits=over_tensor)
    assert (first.count, first.flops, second.flops) == (3, 3 * 2 * 16 * 32 * 16 / 2, 3 * 2 * 16 * 32 * 16 / 2)
    assert first.bytes + second.bytes == 2 * 3 * 2 * (16 * 32 + 32 * 8 + 16 * 8)
    assert first.where.startswith("test_products.py:")
    alone = costs(spread, x, w, mesh=mesh)  # not split over tensor: its devices do the same
    assert sum(one.flops for one in alone) == 2 * (first.flops + second.flops)
    # Left to the compiler the devices of the axes over which an operand is split share the work.
    (one,) = costs(lambda x, w: x @ w, x, w, mesh=mesh, splits=[(("data",), ("tensor",)), ((), ())])
    assert one.flops == 2 * 64 * 32 * 16 / 8


def test_recomputation_counts():
    mesh = js.make_mesh(data=8)
    x, w = jnp.zeros((64, 32)), jnp.zeros((32, 32))

    def loss(w):
        return jax.checkpoint(lambda w: jnp.sin(x @ w) @ w)(w).sum()

    # Forward, once more, and two for each in the backward pass; of the recomputed one only the first is needed.
    total = sum(one.flops for one in costs(jax.value_and_grad(loss), w, mesh=mesh))
    assert total == (2 + 1 + 3) * 2 * 64 * 32 * 32


def test_seconds():
    v6e = chip("TPU v6e")
    # Large products reach 827 of 918 TFLOP/s, here 0.9; 128 columns fill half of a unit of 256.
    assert compute_seconds(v6e, 0.9 * 918e12, "bfloat16") == pytest.approx(1)
    assert compute_seconds(v6e, 0.9 * 918e12, "bfloat16", fill=0.5) == pytest.approx(2)
    assert compute_seconds(v6e, 0.9 * 918e12, "int8") == pytest.approx(0.5)
    assert compute_seconds(v6e, 0.9 * 918e12, "float32", passes=6) == pytest.approx(6)
    mesh = js.make_mesh(data=8)
    x, w = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 128), jnp.bfloat16)
    (one,) = costs(lambda x, w: x @ w, x, w, mesh=mesh, splits=[(("data",), ()), ((), ())], chip=v6e)
    assert one.compute == pytest.approx(2 * 8192 * 4096 * 128 / 8 / (918e12 * 0.9) * 2)
    moved = 2 * (1024 * 4096 + 4096 * 128 + 1024 * 128) / 1640e9
    assert one.seconds == pytest.approx(tuple(one.compute + times * moved for times in TRAFFIC))


@pytest.mark.parametrize(("kept", "products"), [({"attention_out": "offload"}, 2 + 7), ("nothing", 2 + 2 + 7)])
def test_attention_counts_what_its_mask_leaves(kept, products):
    # On planned TPUs: 4 x 4 blocks of 512, of which 10 are not empty; two products forward, seven backward.
    mesh = js.plan.planned_mesh("v5e:2x2", data=4)
    q = jax.ShapeDtypeStruct((4, 2048, 2, 128), jnp.bfloat16)

    def loss(q):
        # XLA leaves out a kernel whose results are offloaded and not computed again; JAX 0.10 traces it.
        attend = jax.checkpoint(lambda q: js.attention(q, q, q, causal=True), policy=policy_function(kept))
        return jnp.sin(attend(q).astype(jnp.float32)).sum()

    def gradient(q):
        return jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)(q)

    layout = js.layout(js.fsdp(), mesh, lambda key: {"w": jnp.zeros(4)}, optax.sgd(0.1))
    with follow_layout(layout):
        found = costs(gradient, q, mesh=mesh)
    kernels = [one for one in found if one.where.startswith("splash") and ".py:" not in one.where]
    assert sum(one.flops for one in kernels) == products * (2 * 4 * 2 * 2048 * 2048 * 128) * 10 / 16 / 4


def test_groups_of_ragged_products():
    mesh = js.make_mesh(data=8)
    rows, experts = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((4, 32, 16), jnp.float32)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def loss(experts, rows, sizes):
        return jax.lax.ragged_dot(rows, experts, sizes).sum()

    # Every row meets one expert, forward and in the gradient of the experts.
    found = costs(jax.grad(loss), experts, rows, sizes, mesh=mesh)
    assert {one.flops for one in found} == {2 * 64 * 32 * 16}


def test_windows_of_tokens_run_as_often_as_an_even_routing_needs():
    mesh = js.make_mesh(expert=8)

    def turns(x, count):
        def window(i, y):
            rows = jax.lax.dynamic_slice_in_dim(y, 0, 16)
            sent = jax.lax.all_to_all(rows, "expert", 0, 0, tiled=True)
            return jax.lax.dynamic_update_slice_in_dim(y, sent @ jnp.ones((32, 32)), 0, 0)

        return jax.lax.fori_loop(0, count[0], window, x)

    spread = jax.shard_map(turns, mesh=mesh, in_specs=(P("expert"), P()), out_specs=P("expert"), check_vma=False)
    x = jax.ShapeDtypeStruct((8 * 40, 32), jnp.float32)
    # Each device has 40 rows, which go in windows of 16: three of them.
    (one,) = costs(spread, x, jax.ShapeDtypeStruct((1,), jnp.int32), mesh=mesh)
    assert (one.count, one.flops) == (3, 3 * 2 * 16 * 32 * 32)
