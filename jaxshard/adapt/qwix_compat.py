"""Rules of qwix under manual mesh axes: refuse those whose scales depend on the rows of other devices.

qwix knows no axis names, so it computes the scale of an array from the part that a device has. This is the scale on one
device if it reads single rows, or a gathered weight. It is another scale if it reads all rows of the batch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax


@contextmanager
def refuse_scales_over_rows(axes: Sequence[str]) -> Iterator[None]:
    """Make a context in which a product by a rule of qwix is refused if its scales read all rows of the batch.

    Args:
      axes: the mesh axes that split rows or positions. Nothing is refused where none of them is manual, since the
        program then sees global arrays.
    """
    if "qwix" not in sys.modules or not axes:
        yield
        return
    from qwix._src.qconfig import QuantizationProvider

    find_rule = QuantizationProvider._get_current_rule_and_op_id

    @functools.wraps(find_rule)
    def find_checked(provider: Any, op_name: str, **how: Any) -> Any:
        rule, number = find_rule(provider, op_name, **how)
        manual = sorted(set(axes) & set(jax.sharding.get_abstract_mesh().manual_axes))
        if manual and rule is not None and rule.weight_qtype is not None:
            _check_rule(rule, op_name, manual)
        return rule, number

    # Every provider asks this method for the rule of each product, at the time when the loss is traced.
    QuantizationProvider._get_current_rule_and_op_id = find_checked
    try:
        yield
    finally:
        QuantizationProvider._get_current_rule_and_op_id = find_rule


def _check_rule(rule: Any, op_name: str, manual: list[str]) -> None:
    reasons = {
        "bwd_qtype": "rounds the gradient of a product, with a scale over all rows for each output channel",
        "disable_channelwise_axes": "takes one scale for all rows of the activations",
        "act_static_scale": "averages the scales of activations over the rows, in the model's state",
    }
    if found := [name for name in reasons if getattr(rule, name, None)]:
        what = "; ".join(f"{name}={getattr(rule, name)!r} {reasons[name]}" for name in found)
        raise ValueError(
            f"qwix: the rule for {op_name} in modules {rule.module_path!r}: {what}. The devices of {manual} have "
            "different rows and would find different scales. Leave it out of the rule, or use js.auto(), which sees "
            "all rows"
        )
