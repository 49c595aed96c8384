"""Names of JAX's primitives by their effect on positions, in addition to core/primitives.py.

A test checks that JAX has primitives of these names.
"""

from __future__ import annotations

from jaxshard.core.primitives import ELEMENTWISE, SAME

KEPT = SAME | {
    "stop_gradient", "name", "reduce_precision", "random_clone", "layout_constraint", "with_memory_space_constraint",
}  # fmt: skip
"""Result i is operand i, unchanged."""

EACH_ELEMENT = ELEMENTWISE | {
    "random_fold_in", "random_seed", "random_gamma", "threefry2x32", "log2", "one_minus_square", "mulhi",
}  # fmt: skip
"""Elementwise: element i of a result depends on element i of each operand; sizes of 1 are broadcast."""

REDUCTIONS = frozenset(
    {
        "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
        "argmin", "reduce",
    }
)  # fmt: skip
"""Reductions, over the dimensions in the parameter "axes" ("dimensions" for `reduce`)."""

SHARDED_SUMS = frozenset({"psum", "psum_invariant"})
"""Sums over devices."""

WITHOUT_RESULT = frozenset({"debug_callback", "debug_print"})
"""Primitives that only print values."""
