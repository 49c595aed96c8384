"""Names of JAX's primitives by what they do to positions, beside those of core/primitives.py; a test looks for all."""

from __future__ import annotations

from jaxshard.core.primitives import ELEMENTWISE, SAME

KEPT = SAME | {
    "stop_gradient", "name", "reduce_precision", "random_clone", "layout_constraint", "with_memory_space_constraint",
}  # fmt: skip
"""Each result is the operand at the same place."""

EACH_ELEMENT = ELEMENTWISE | {
    "random_fold_in", "random_seed", "random_gamma", "threefry2x32", "log2", "one_minus_square", "mulhi",
}  # fmt: skip
"""Element i of a result depends on element i of each operand; sizes of 1 are repeated."""

REDUCTIONS = frozenset(
    {
        "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
        "argmin", "reduce",
    }
)  # fmt: skip
"""They reduce dimensions in the parameter "axes" or, of `reduce`, "dimensions"."""

SCANNED = {
    "cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis",
    "sort": "dimension", "top_k": "axis", "approx_top_k": "reduction_dimension",
}  # fmt: skip
"""They mix elements along the dimension in the parameter of that name, and keep all dimensions."""

SHARDED_SUMS = frozenset({"psum", "psum_invariant"})

WITHOUT_RESULT = frozenset({"debug_callback", "debug_print"})
"""They only show values."""
