"""Count the FLOPs of the matrix products and factorizations in the jaxpr of an optimizer's update."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import jaxprs_in_params

from jaxshard.core.jaxpr import open_jaxpr


def product_flops(program: Any) -> int:
    """Count the FLOPs of the matrix products in a jaxpr; a factorization, such as QR, counts as ten products.

    A `while` loop counts as one iteration, a `cond` as its most expensive branch.
    """
    return sum(map(_flops, open_jaxpr(program)[0].eqns))


def _flops(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        contracted_size = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
        return 2 * int(eqn.outvars[0].aval.size) * int(contracted_size)
    if name in FACTORIZED:
        shape = eqn.invars[0].aval.shape
        return 20 * int(math.prod(shape)) * int(min(shape[-2:]))
    if name == "scan":
        return int(params["length"]) * product_flops(params["jaxpr"])
    if name == "cond":
        return max(map(product_flops, params["branches"]))
    return sum(map(product_flops, jaxprs_in_params(params)))


FACTORIZED = frozenset({"cholesky", "eig", "eigh", "lu", "qr", "geqrf", "svd", "schur", "hessenberg"})
