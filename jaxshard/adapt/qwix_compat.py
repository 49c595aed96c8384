"""What we need of qwix beside its documented functions.

Under manual mesh axes, rules are refused whose scales depend on the rows of other devices. qwix knows no axis names, so
it computes the scale of an array from the part that a device has. This is the scale on one device if it reads single
rows, or a gathered weight. It is another scale if it reads all rows of the batch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np


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


def make_provider(rules: Sequence[Any]) -> Any:
    """Make a `qwix.QtProvider` for products whose left operand may have the shape of the right one.

    qwix takes an operand with the shape of a parameter for this parameter, and fails if both operands of a product are
    parameters: [rows, width] beside a square weight, if there are as many rows.
    """
    import qwix

    class Provider(qwix.QtProvider):  # type: ignore[misc]  # mypy reads qwix as Any
        def _create_dot_general_qt_config(self, rule: Any, op_id: str, lhs: Any, rhs: Any) -> Any:
            activation = np.zeros(0) if lhs.shape == rhs.shape else lhs
            return super()._create_dot_general_qt_config(rule, op_id, activation, rhs)

    return Provider(rules)


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
