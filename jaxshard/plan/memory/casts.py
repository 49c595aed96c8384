"""Casts that undo one another, which compilers leave out."""

from __future__ import annotations

from jaxshard.plan.memory.graph import Op, Region, Value, dtype_bits, eliminate

_PASSED_ON = frozenset({"enter", "pvary"})
"""Operations that pass an array on as it is."""


def cancel_casts(region: Region) -> None:
    """Read an array where it is cast to a wider type and back: XLA's simplifier drops both casts.

    So a gradient that a product makes in bf16, which autodiff casts to the parameter's type, is summed over devices in
    bf16 as the product wrote it; no wider copy of it waits for that sum behind the backward pass. Bodies of loops stay
    as they are: what they cast is free again at the end of a turn.
    """
    makers: dict[Value, Op] = {}
    for op in region.ops:
        if op.name == "convert_element_type" and op.ins:
            before = _before_widening(op.ins[0], makers)
            if before is not None and before.dtype == op.outs[0].dtype and before.split == op.outs[0].split:
                op.ins = [before]
        makers.update((one, op) for one in op.outs)
    eliminate(region, set(region.outputs))


def _before_widening(value: Value, makers: dict[Value, Op]) -> Value | None:
    """Return what was cast to the wider type of a value, None if nothing was."""
    op = makers.get(value)
    while op is not None and op.name in _PASSED_ON and op.ins and op.ins[0].shape == value.shape:
        op = makers.get(op.ins[0])
    if op is None or op.name != "convert_element_type" or not op.ins:
        return None
    (narrow,), (wide,) = op.ins, op.outs
    floats = all(str(one.dtype) in ("bfloat16", "float16", "float32", "float64") for one in (narrow, wide))
    return narrow if floats and dtype_bits(narrow.dtype) < dtype_bits(wide.dtype) else None
