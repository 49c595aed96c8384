"""Recognise transfers between TPU slices: pairs of a send and a recv in place of a collective.

The collectives of a program connect the chips of one slice, over their own links. Slices are connected by the data
center's network, so data for another slice is sent to the host:

    %send = (f32[16,8,128], u32[], token[]) send(%x, %t), is_host_transfer=true,
            frontend_attributes={_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
    %recv = (f32[16,8,128], u32[], token[]) recv(%t), ...

is an all-reduce of f32[16,8,128] between two slices: each chip communicates with the chip at the same position in the
other slice. Arrays are padded to rows of 128, and several arrays may be joined into one.
"""

from __future__ import annotations

import re

from jaxshard.hlo import hlo

_BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_GATHER": "all-gather",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
"""The collective that a transfer between slices is, by its transfer type."""


def is_transfer(op: hlo.Op) -> bool:
    """Return True for a send to the host or a recv from the host, by which TPU slices communicate."""
    return op.opcode in ("send", "recv")


def names_all_slices(op: hlo.Op) -> bool:
    """Return True if a transfer connects all slices: only then the compiler lists the slices in its metadata."""
    return "_xla_megascale_target=" in op.notes


def transfer_kind(op: hlo.Op) -> str | None:
    """Return the kind of collective, such as "all-reduce", that a send or recv between slices is a part of.

    A collective is a pair of a send and a recv. Only the operation with the full array has a kind: the recv of an
    all-gather, the send of all others. None is returned for the other operation, so that a pair counts once.

    Raises:
      ValueError: the type of the transfer is not known.
    """
    found = re.search(r'_xla_megascale_transfer_type="(\w+)"', op.notes)
    if found is None or found[1] not in _BETWEEN_SLICES:
        raise ValueError(f"a transfer between slices of an unknown type: {op.opcode} {op.name}{op.notes[:200]!r}")
    kind = _BETWEEN_SLICES[found[1]]
    return kind if (op.opcode == "recv") is (kind == "all-gather") else None
