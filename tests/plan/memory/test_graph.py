"""Values of a traced program have the shapes that one device holds."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.graph import build


def test_a_broadcast_is_split_along_the_dimension_that_it_adds_where_a_shard_map_takes_one_copy_each():
    # The derivative of a sum over the parts of devices: each of them needs the one copy that is its own.
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    each = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False)

    def shards(shape, dims):
        closed = jax.make_jaxpr(lambda x: each(jax.lax.broadcast_in_dim(x * 1, (8, 16), dims)))(
            jax.ShapeDtypeStruct(shape, jnp.float32)
        )
        region = build(closed, [(((),), "", "x")], dict(mesh.shape))
        return [op.outs[0].shard for op in region.ops if op.name == "broadcast_in_dim"]

    assert shards((16,), (1,)) == [(1, 16)]
    assert shards((8,), (0,)) == [(8, 16)]  # its operand is whole, and a split would be one of it too
