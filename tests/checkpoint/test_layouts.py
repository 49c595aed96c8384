"""What lies in a checkpoint is in model order, and gets there without being gathered."""

import jax

from jaxshard.checkpoint.leaves import entries, jit_to_saved, jit_to_stored
from jaxshard.hlo.found import collectives
from tests.checkpoint.runs import made


def test_arrays_are_never_gathered_on_the_way():
    """Blocks in pipeline order reach model order, and come back, by one all-to-all over the pipeline."""
    layout, seen = made("three").layout, set()
    for entry in entries(layout)[0]:
        if entry.placement.view.extra_dims and entry.shape not in seen:
            seen.add(entry.shape)
            stored = jax.ShapeDtypeStruct(
                entry.placement.view.stored, entry.dtype, sharding=entry.placement.sharding(layout.mesh)
            )
            saved = entry.shape_saved(layout.mesh)
            assert saved.sharding.shard_shape(saved.shape) != saved.shape
            for program, x in ((jit_to_saved, stored), (jit_to_stored, saved)):
                found = collectives(program(entry, layout.mesh).lower(x).compile(), layout.mesh)
                assert [(one.kind, one.axes) for one in found] == [("all-to-all", ("pipe",))], entry
    assert len(seen) >= 5
