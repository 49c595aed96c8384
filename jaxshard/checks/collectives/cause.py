"""Explain in words which array a collective moves and why the compiler inserted it.

all-reduce over tensor, f32[4, 8, 32], dot_general at model.py:80
  what    f32[4, 8, 32], made by dot_general at model.py:80 in the forward pass
  cause   dot_general contracts a dimension that is split over tensor: every device has a part of the sum
"""

from __future__ import annotations

from jaxshard.core.text_table import first_words
from jaxshard.hlo.found import Collective
from jaxshard.hlo.trail import COLLECTIVES, PRODUCTS, SCATTERED, operation_of, pass_of

_CUTS = ("concatenate", "dynamic_slice", "dynamic_update_slice", "pad", "rev", "roll", "slice", "split")
_PARTS = ("dynamic_slice", "dynamic_update_slice", "gather", "slice", "squeeze")
_FOLDS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "merge", "transpose")
_LOOKUPS = ("gather", "take", "select_n", "_take")


def array_words(one: Collective) -> str:
    """Describe the first array that a collective moves, and where it comes from.

    For example "weight blocks/wq, bf16[32, 64]" for an argument of the step, or "f32[4, 8], made by dot_general at
    model.py:80 in the forward pass" for a computed array.
    """
    dtype, shape = one.arrays[0]
    array = f"{dtype}{list(shape)}"
    if one.trail.arguments:
        return f"{first_words(one.trail.arguments)}, {array}"
    words = array if dtype.startswith(("f", "bf")) else f"indices {array}"
    made, when = _operation(one.trail.maker, one.trail.made_at), pass_of(one.op_name)
    return words + (f", made by {made}" if made else "") + (f" in the {when}" if when else "")


def cause(one: Collective) -> str:
    """Explain in a few words why a collective is in the program, by the first array that it moves.

    For example "dot_general contracts a dimension that is split over tensor: every device has a part of the sum".
    The explanation is "" if nothing is known about the array (`one.trails` is empty).
    """
    own, over = operation_of(one.op_name), "+".join(one.axes)
    if not one.trails:
        return ""
    if own in COLLECTIVES:
        return f"the program itself has it, as {own}"
    if one.kind in ("all-reduce", "reduce-scatter"):
        return _cause_of_sum(one, own, over)
    if one.kind == "all-gather":
        return _cause_of_gather(one, own, over)
    if one.kind.endswith("all-to-all"):
        made, read = _ends(one, own)
        return f"{made} leaves it split over {over} along another dimension than {read} needs"
    if one.kind == "collective-permute":
        return _cause_of_permute(one, own, over)
    return f"the compiler's own, for {own or 'an operation whose name it lost'}"


def _cause_of_sum(one: Collective, own: str, over: str) -> str:
    maker = own if own in PRODUCTS else one.trail.maker or own
    if one.trail.arguments:
        return f"a gather over {over} that is written as a sum of arrays that are zero on all devices but one"
    if maker in PRODUCTS:
        return f"{maker} contracts a dimension that is split over {over}: every device has a part of the sum"
    if maker in _LOOKUPS:
        return f"a lookup in a table whose rows are split over {over}: every device has those of its part, else zeros"
    if maker.startswith("scatter"):
        return f"{maker} adds up what each device along {over} looked up: every device has a part of the sum"
    if maker.startswith(("reduce_", "arg", "cum")):
        return f"{maker} goes along a dimension that is split over {over}: every device has a part of it"
    return f"every device along {over} has a part of the result of {maker or 'an operation whose name it lost'}"


def _cause_of_gather(one: Collective, own: str, over: str) -> str:
    trail = one.trail
    need = f"it replicated over {over}" if trail.dim is None else f"all of dimension {trail.dim}, split over {over}"
    if own == "sharding_constraint":
        return f"a constraint asks for {need}: {_operation(trail.reader, trail.read_at) or 'nothing near'} reads it"
    if own in _PARTS:
        along = "a dimension" if trail.dim is None else f"dimension {trail.dim}"
        return f"{own} takes a part along {along}, which is split over {over}: for that every device has all of it"
    return f"{_operation(trail.reader or own, trail.read_at or one.place)} needs {need}"


def _cause_of_permute(one: Collective, own: str, over: str) -> str:
    name = own or one.trail.reader
    if one.trail.maker == SCATTERED:
        return f"a sum is scattered over {over} in shards of whole tiles: neighbours exchange the elements in between"
    if name in PRODUCTS:
        return f"shards go around a ring over {over}, while {name} multiplies one after the other"
    if name in _CUTS or name.startswith("conv"):
        return f"{name} cuts or joins a dimension elsewhere than it is split over {over}: neighbours exchange the rest"
    if name in _FOLDS:
        return f"{name} folds a dimension, which changes the part of each device along {over}"
    made, read = _ends(one, own)
    return f"{made} leaves other parts on the devices along {over} than {read} needs"


def _ends(one: Collective, own: str) -> tuple[str, str]:
    """Describe (the operation that computes a collective's first array, the operation that reads it).

    `own` is JAX's name of the collective itself, which replaces an operation that is not known.
    """
    trail = one.trail
    made = first_words(trail.arguments) or _operation(trail.maker, trail.made_at) or own or "what makes it"
    return made, _operation(trail.reader, trail.read_at) or own or "what reads it"


def _operation(name: str, line: str) -> str:
    name = "the loop" if name == "while" else name
    return " at ".join(filter(None, (name, line)))
