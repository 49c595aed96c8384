"""The transforms that `test_optimizers.py` runs, and those that gradients alone are not enough for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax
from optax import contrib

import jaxshard as js
from tests.optim.proof.aliases import ALIASES, WRAPPERS

PyTree = Any

PLAIN = {"layer": {"bias": (1001,), "kernel": (16, 24)}, "kernel": (13, 7), "deep": (3, 5, 16), "scale": ()}
"""`layer/bias` and `kernel` are padded; `kernel` also ends the path of another parameter; `scale` cannot be split."""
ARRAYS = {name: shapes for name, shapes in PLAIN.items() if name != "scale"}
STACK = {"blocks": {"bias": (3, 33), "kernel": (3, 16, 24)}, "embed": (7, 13), "scale": ()}


class Case(NamedTuple):
    """A transform and what it is given.

    Attributes:
      make: makes it.
      shapes: of the parameters.
      low_precision: parameters of more than one dimension are bf16.
      size: of the elements of the parameters.
      outlier: what one element of the second gradient is multiplied with.
    """

    make: Callable[[], Any]
    shapes: PyTree = PLAIN
    low_precision: bool = False
    size: float = 1.0
    outlier: float = 1.0


def _lookahead() -> optax.GradientTransformation:
    """optax's, which takes the gradient of the fast parameters alone, for a loss that uses these alone."""
    tx = optax.lookahead(optax.adam(0.1), sync_period=2, slow_step_size=0.5)
    return optax.GradientTransformation(tx.init, lambda grads, state, params=None: tx.update(grads.fast, state, params))


def _skip_large_updates() -> optax.GradientTransformation:
    def skip(updates: PyTree, step: Any, params: PyTree) -> Any:
        return optax.skip_large_updates(updates, step, params, max_squared_norm=1e6)

    return optax.MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=skip).gradient_transformation()


CASES = {name: Case(make) for name, make in (ALIASES | WRAPPERS).items()} | {
    "sm3": Case(ALIASES["sm3"], ARRAYS),  # fails on a scalar parameter, on one device as well
    "scale_by_distance_over_gradients": Case(WRAPPERS["scale_by_distance_over_gradients"], ARRAYS),  # makes it [1]
    "zero_nans": Case(WRAPPERS["zero_nans"], outlier=np.nan),
    "apply_if_finite": Case(WRAPPERS["apply_if_finite"], outlier=np.nan),
    "skip_not_finite": Case(WRAPPERS["skip_not_finite"], outlier=np.nan),
    "skip_large_updates": Case(_skip_large_updates, outlier=1e4),
    # These subtract parameters, which must not be much larger than their updates: that loses digits, on one device too.
    "contrib.cocob": Case(ALIASES["contrib.cocob"], size=0.01),
    "lbfgs_without_search": Case(WRAPPERS["lbfgs_without_search"], size=0.01),
    "lookahead": Case(_lookahead, optax.LookaheadParams(ARRAYS, ARRAYS)),
    "js.optim.master": Case(lambda: js.optim.master(optax.adamw(0.1)), low_precision=True),
    "js.optim.averaged": Case(lambda: js.optim.averaged(optax.adamw(0.1), 0.9)),
    "js.optim.master(averaged)": Case(
        lambda: js.optim.master(js.optim.averaged(optax.sgd(0.1, momentum=0.9), 0.9)), low_precision=True
    ),
    "js.optim.clip_by_global_norm": Case(lambda: optax.chain(js.optim.clip_by_global_norm(0.5), optax.adam(0.1))),
    "js.optim.per_block(adam)": Case(lambda: js.optim.per_block(optax.adam(0.1)), STACK),
    "js.optim.per_block(lamb)": Case(lambda: js.optim.per_block(optax.lamb(0.1)), STACK),
    "js.optim.per_block(adafactor)": Case(
        lambda: js.optim.per_block(optax.adafactor(0.1, min_dim_size_to_factor=8)), STACK
    ),
    "js.optim.per_block(muon)": Case(lambda: js.optim.per_block(contrib.muon(0.1)), STACK),
    "adafactor_factored": Case(lambda: optax.adafactor(0.1, min_dim_size_to_factor=7)),
}


class Refusal(NamedTuple):
    """A transform that needs more than gradients, and what it then raises, on one device as well."""

    make: Callable[[], Any]
    error: type[Exception]
    message: str


OBJECTIVE = "obj_fn must be provided to hutchinson update function"
REFUSED = {
    "contrib.sophia": Refusal(lambda: contrib.sophia(0.1), ValueError, OBJECTIVE),
    "contrib.hutchinson_estimator_diag_hessian": Refusal(
        contrib.hutchinson_estimator_diag_hessian, ValueError, OBJECTIVE
    ),
    "contrib.sam(opaque_mode=True)": Refusal(
        lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True),
        ValueError,
        "grad_fn must be provided when opaque_mode=True",
    ),
    "contrib.dpsgd": Refusal(
        lambda: contrib.differentially_private_aggregate(1.0, 1.0, key=0),  # its first part; itself it warns of `seed`
        ValueError,
        "expects `grads` to have a batch dimension in the 0th axis",
    ),
}


GIVEN = {
    "lbfgs": "the loss, its gradient and the loss as a function of the parameters, for its line search",
    "polyak_sgd": "the loss",
    "contrib.momo": "the loss",
    "contrib.momo_adam": "the loss",
    "contrib.reduce_on_plateau": "the loss",
    "lookahead": "parameters that are an `optax.LookaheadParams`, and the gradients of the fast ones",
}
"""What asks for more than gradients and gets it; `test_extra_args.py` compares with one device."""


PARTS = {
    *("add_decayed_weights", "chain", "identity", "measure_with_ema", "monitor", "scale", "set_to_zero", "stateless"),
    *("stateless_with_tree_map", "trace", "with_extra_args_support", "schedule_free"),
    *("differentially_private_aggregate", "multi_transform", "inject_stateful_hyperparams"),
}
"""Building blocks of the transforms of `CASES`, and old names of these."""
