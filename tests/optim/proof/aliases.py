"""Every optimizer of optax and of optax.contrib that takes plain gradients, and wrappers around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

Make = Callable[[], Any]


def _deprecated(make: Callable[[float], Any]) -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return make(0.1)


_PLAIN = (
    *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan"),
    *("amsgrad", "fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd", "optimistic_adam_v2"),
    *("radam", "rmsprop", "rprop", "sgd", "sign_sgd", "signum", "sm3", "yogi"),
)
_CONTRIB = (
    *("acprop", "ademamix", "adopt", "cocob", "dadapt_adamw", "dog", "dowg", "madgrad"),
    *("muon", "simplified_ademamix"),
)

ALIASES: dict[str, Make] = {
    **{name: lambda name=name: getattr(optax, name)(0.1) for name in _PLAIN},
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "noisy_sgd": lambda: optax.noisy_sgd(0.1, key=0),
    "optimistic_adam": lambda: _deprecated(optax.optimistic_adam),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(0.1),
    **{f"contrib.{name}": lambda name=name: getattr(contrib, name)(0.1) for name in _CONTRIB},
    "contrib.galore": lambda: contrib.galore(0.1, rank=2),
    "contrib.prodigy": lambda: contrib.prodigy(),
    "contrib.schedule_free_adamw": lambda: contrib.schedule_free_adamw(0.1),
    "contrib.schedule_free_sgd": lambda: contrib.schedule_free_sgd(0.1),
}
"""Aliases by name."""


class _Halving(optax.schedules.StatefulSchedule):
    """A learning rate that halves at every step, as state."""

    def init(self) -> Any:
        return jnp.float32(0.1)

    def update(self, state: Any, **extra_args: Any) -> Any:
        return state / 2

    def __call__(self, state: Any, **extra_args: Any) -> Any:
        return state


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _kinds(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", params)


WRAPPERS: dict[str, Make] = {
    "clip": lambda: optax.chain(optax.clip(0.3), optax.sgd(0.1)),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "normalize": lambda: optax.chain(contrib.normalize(), optax.sgd(0.1)),
    "normalize_by_update_norm": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "apply_every": lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "keep_params_nonnegative": lambda: optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "mask": lambda: optax.adamw(0.1, weight_decay=0.1, mask=_matrices),
    "masked": lambda: optax.masked(optax.adam(0.1), _matrices),
    "freeze": lambda: optax.chain(optax.adam(0.1), optax.transforms.freeze(_matrices)),
    "partition": lambda: optax.partition({"matrix": optax.adam(0.1), "other": optax.sgd(0.1)}, _kinds),
    "named_chain": lambda: optax.named_chain(("a", optax.trace(0.9)), ("b", optax.scale(-0.1))),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
    "skip_large_updates": lambda: optax.MultiSteps(
        optax.adam(0.1),
        2,
        should_skip_update_fn=lambda u, s, p: optax.skip_large_updates(u, s, p, max_squared_norm=9.0),
    ).gradient_transformation(),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.adam(0.1), lambda step, **_: step % 2 == 0),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(0.1, 10)),
    "warmup": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)),
    "piecewise": lambda: optax.sgd(optax.piecewise_interpolate_schedule("cosine", 0.1, {1: 0.5, 2: 0.1})),
    "joined": lambda: optax.sgd(
        optax.join_schedules([optax.constant_schedule(0.1), optax.linear_schedule(0.1, 0, 5)], [1])
    ),
    "lookahead_free": lambda: contrib.schedule_free(optax.adam(0.1), 0.1),
    "mechanize": lambda: contrib.mechanize(optax.sgd(0.1)),
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05))),
    "sam_without_norm": lambda: contrib.sam(optax.sgd(0.1), optax.sgd(0.05)),
    "lbfgs_without_search": lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None),
    "add_noise": lambda: optax.chain(optax.add_noise(0.01, 0.55, key=0), optax.sgd(0.1)),
    "scale_by_distance_over_gradients": lambda: optax.chain(
        optax.scale_by_distance_over_gradients(), optax.scale(-0.1)
    ),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(0.1)),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(0.1), lambda step, **_: step % 2 == 0),
    "selective_transform": lambda: optax.selective_transform(optax.adam(0.1), freeze_mask=False),
    "skip_not_finite": lambda: optax.MultiSteps(
        optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "stateful_schedule": lambda: optax.inject_hyperparams(optax.adam)(_Halving()),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(0.1)),
}
"""Wrappers by name."""

TYPICAL = {
    *("adafactor", "adagrad", "adamw", "lamb", "lars", "lion", "momentum", "noisy_sgd", "rprop", "sgd", "sm3"),
    *("contrib.dadapt_adamw", "contrib.galore", "contrib.muon", "contrib.prodigy", "contrib.schedule_free_adamw"),
    *("clip", "clip_by_global_norm", "adaptive_grad_clip", "centralize", "zero_nans", "mask", "partition", "flatten"),
    *("MultiSteps", "apply_if_finite", "inject_hyperparams", "mechanize", "sam", "lbfgs_without_search"),
    *("skip_not_finite", "stateful_schedule", "scale_by_distance_over_gradients", "split_real_and_imaginary"),
}
"""One of each kind: the aliases and wrappers that the fast tests run; the slow ones run all."""
