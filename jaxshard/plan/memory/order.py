"""The order in which compilers run what a program leaves open."""

from __future__ import annotations

from jaxshard.plan.memory.graph import Op, Region, Value

_SUMS = ("psum", "psum2", "psum_invariant")
_SCATTERS = ("reduce_scatter", "psum_scatter")
_SAME = ("optimization_barrier", "enter", "reshape", "convert_element_type", "name")


def sums_stacks_twice(region: Region) -> bool:
    """Return True where what a loop stacks is scattered behind it, and the parts are summed over other axes.

    So are the gradients of hybrid sharding. All the sums of a step then stand behind its backward pass, and XLA for
    TPUs keeps products for that place which nothing needs before, to run beside them.
    """
    readers: dict[Value, list[Op]] = {}
    for op in region.ops:
        for one in op.ins:
            readers.setdefault(one, []).append(op)

    def followed(value: Value, names: tuple[str, ...]) -> list[Op]:
        found = []
        for op in readers.get(value, ()):
            if op.name in names:
                found.append(op)
            elif op.name in _SAME:
                found += followed(op.outs[op.ins.index(value)] if len(op.outs) > 1 else op.outs[0], names)
        return found

    stacked = [one for op in region.ops if op.name == "scan" for one in op.outs[op.counts[1] :]]
    return any(followed(part, _SUMS) for one in stacked for op in followed(one, _SCATTERS) for part in op.outs)
