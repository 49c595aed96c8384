"""Models whose structure the library knows, and the functions by which it recognises them.

`model.init`, `model.loss` and `model.evaluate` of a known model are not bound methods but small values, `InitOf`,
`LossOf` and `EvaluateOf`, that carry their model. So recognition is an `isinstance`, not a comparison of
names, and works through `jax.jit`. A user's function that *calls* such a value (a lambda, a loss with a penalty) is
recognised while it is traced: `models_run` lists the known models whose functions ran.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxshard.core.loss import Max, Mean, Sum
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree


class KnownModel:
    """The base class of models whose structure the library knows.

    A subclass implements `make_params`, `compute_loss` and `compute_metrics`; users call their public forms `init`,
    `loss` and `evaluate`, which carry the model.
    """

    stacked_for_user: bool = False
    """True if the user wrote single blocks that the library stacked: the optimizer must update them one by one."""

    @property
    def init(self) -> InitOf:
        """`init(key)`: the parameters, or js.Model(params, state) where the model has variables besides parameters."""
        return InitOf(self)

    @property
    def loss(self) -> LossOf:
        """`loss(model, batch, key)`: the loss of a global training batch, as one device computes it."""
        return LossOf(self)

    @property
    def evaluate(self) -> EvaluateOf:
        """`evaluate(model, batch)`: {"loss": js.Mean} and the loss's metrics, computed without a random key."""
        return EvaluateOf(self)

    def make_params(self, key: jax.Array) -> PyTree:
        """Make the result of `init`: the parameters, or `js.Model(params, state)`."""
        raise NotImplementedError

    def compute_loss(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        """Compute the result of `loss`: a `js.Mean`, a scalar or a `js.Loss`."""
        raise NotImplementedError

    def compute_metrics(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        """Compute the result of `evaluate`: the loss and metrics of a batch, by name."""
        raise NotImplementedError

    def separate_labels(self, batch: PyTree) -> PyTree:
        """Return a batch with inputs and labels as separate arrays, as `js.context` needs them."""
        return batch

    def to_module(self, model: PyTree, key: jax.Array) -> Any:
        """Convert what `init` returns to the form in which the user's library holds a model; see `js.to_module`.

        Args:
          model: parameters, or `js.Model(params, state)`, in model order, on one device.
          key: a random key, from which random streams of the result draw.
        """
        return model

    def from_module(self, module: Any) -> PyTree:
        """Convert a model in the form of `to_module` to what `init` returns: the inverse of `to_module`."""
        return module

    def dim_names(self, params: PyTree) -> PyTree:
        """Return, for every parameter, a tuple with a logical name or None for each of its first dimensions."""
        raise NotImplementedError


@dataclass(frozen=True)
class InitOf:
    """The `init_fn` of a known model."""

    model: KnownModel

    def __repr__(self) -> str:
        return f"{self.model!r}.init"

    def __call__(self, key: jax.Array) -> PyTree:
        made = self.model.make_params(key)
        _note(self.model, made)
        return made


@dataclass(frozen=True)
class LossOf:
    """The `loss_fn` of a known model."""

    model: KnownModel

    def __repr__(self) -> str:
        return f"{self.model!r}.loss"

    def __call__(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        _note(self.model, model)
        return self.model.compute_loss(model, batch, key)


@dataclass(frozen=True)
class EvaluateOf:
    """The `eval_fn` of a known model."""

    model: KnownModel

    def __repr__(self) -> str:
        return f"{self.model!r}.evaluate"

    def __call__(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        return self.model.compute_metrics(model, batch)


def check_function(name: str, fn: Any, call: str) -> None:
    """Raise TypeError unless `fn` is a function that can be called as `call`; see `check_is_function`."""
    check_is_function(name, fn, call)
    check_call(name, fn, call)


def check_is_function(name: str, fn: Any, call: str) -> None:
    """Raise TypeError unless `fn` is a function; for a known model the message names the method to pass.

    Args:
      name: the name of the parameter: "init_fn", "loss_fn" or "eval_fn".
      fn: the user's argument.
      call: how the function is called, such as "init_fn(key)".
    """
    if isinstance(fn, KnownModel):
        method = {"init_fn": "init", "loss_fn": "loss", "eval_fn": "evaluate"}[name]
        raise TypeError(f"{name} must be a function {call}, got the model itself; pass model.{method}")
    if not callable(fn):
        raise TypeError(f"{name} must be a function {call}, got {type(fn).__name__}")


def check_call(name: str, fn: Any, call: str) -> None:
    """Raise TypeError if `fn` takes other arguments than `call`, such as another method of a known model."""
    _check_method(name, fn, call)
    _check_parameters(name, fn, call)


def _check_method(name: str, fn: Any, call: str) -> None:
    """Raise TypeError for the wrong method of a known model, such as `model.init` for `loss_fn`."""
    methods = {InitOf: "init", LossOf: "loss", EvaluateOf: "evaluate"}
    own = {"init_fn": "init", "loss_fn": "loss", "eval_fn": "evaluate"}.get(name)
    given = methods.get(type(unwrap(fn)))
    if own is not None and given not in (None, own):
        raise TypeError(f"{name} must be a function {call}, got model.{given}; pass model.{own}")


def _check_parameters(name: str, fn: Any, call: str) -> None:
    """Raise TypeError for a function whose signature does not allow the call."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin; calling it will tell
        return
    words = call.partition("(")[2].removesuffix(")").split(", ")
    try:
        signature.bind(*words)
    except TypeError:
        shown = getattr(fn, "__qualname__", type(fn).__qualname__).rpartition(".")[2]
        raise TypeError(
            f"{name} is called as {call}, and {shown}{signature} can't be: give it these parameters, in this order, "
            "whether it uses them or not"
        ) from None


def unwrap(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside `jax.jit` and inside partials that bind nothing.

    Other wrappers are kept, even if they have `__wrapped__`: they may compute something else.
    """
    while True:
        if isinstance(fn, functools.partial) and not fn.args and not fn.keywords:
            fn = fn.func
        elif isinstance(fn, jax.stages.Wrapped) and hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            return fn


def known_loss(fn: Callable[..., Any]) -> KnownModel | None:
    """Return the known model if `fn` is its `loss`; None for any other function."""
    fn = unwrap(fn)
    return fn.model if isinstance(fn, LossOf) else None


def known_evaluate(fn: Callable[..., Any]) -> KnownModel | None:
    """Return the known model if `fn` is its `evaluate`; None for any other function."""
    fn = unwrap(fn)
    return fn.model if isinstance(fn, EvaluateOf) else None


class ModelRun(NamedTuple):
    """A known model whose `init` or `loss` ran, and the shapes that it returned or received."""

    model: KnownModel
    tree: PyTree


class _Runs:
    """A list of `ModelRun` that compares by identity, as part of the key under which JAX caches a traced function."""

    def __init__(self) -> None:
        self.found: list[ModelRun] = []


# JAX traces functions under jax.jit again where this differs, so that a cached jaxpr never hides a model.
_runs = jax.make_user_context(default_value=None)


@contextmanager
def models_run() -> Iterator[list[ModelRun]]:
    """Collect the known models whose `init` or `loss` runs in the block, in order.

    An enclosing `models_run` block collects them as well.
    """
    outer: _Runs | None = _runs.value
    runs = _Runs()
    with _runs(runs):
        yield runs.found
    if outer is not None:
        outer.found.extend(runs.found)


def _note(model: KnownModel, tree: PyTree) -> None:
    runs: _Runs | None = _runs.value
    if runs is not None:
        runs.found.append(ModelRun(model, abstract(tree)))
