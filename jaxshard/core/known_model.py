"""Models that the library can look into, and the functions by which it recognises them.

`model.init`, `model.loss` and `model.evaluate` of a known model are not bound methods but small values, `InitOf`,
`LossOf` and `EvaluateOf`, that carry their model. So recognition is an `isinstance`, not a look at names, and it
survives `jax.jit`. A function of the user's that *calls* one of them (a lambda, a loss with a penalty) is recognised
while it is traced: `models_run` lists the known models whose functions ran.
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
    """The base of models that the library can look into.

    A subclass implements `make_params`, `compute_loss` and `compute_metrics`; their public forms `init`, `loss` and
    `evaluate` say which model they belong to.
    """

    stacked_for_user: bool = False
    """True if the user wrote single blocks that were stacked here: the optimizer has to update them as single ones."""

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
        """`evaluate(model, batch)`: {"loss": js.Mean} and the loss's metrics, without keys; for `js.make_eval_step`."""
        return EvaluateOf(self)

    def make_params(self, key: jax.Array) -> PyTree:
        """Make what `init` returns."""
        raise NotImplementedError

    def compute_loss(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        """Compute what `loss` returns."""
        raise NotImplementedError

    def compute_metrics(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        """Compute what `evaluate` returns."""
        raise NotImplementedError

    def separate_labels(self, batch: PyTree) -> PyTree:
        """Return a batch with labels beside its inputs, position by position, for `js.context`, which splits both."""
        return batch

    def dim_names(self, params: PyTree) -> PyTree:
        """Return for every parameter a tuple with the logical name, or None, of its first dimensions, as a tree."""
        raise NotImplementedError


@dataclass(frozen=True)
class InitOf:
    """The `init_fn` of a known model."""

    model: KnownModel

    def __repr__(self) -> str:
        return f"{self.model!r}.init"

    def __call__(self, key: jax.Array) -> PyTree:
        """Return the model's parameters, with its state where it has one."""
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
        """Return the loss of a batch."""
        _note(self.model, model)
        return self.model.compute_loss(model, batch, key)


@dataclass(frozen=True)
class EvaluateOf:
    """The `eval_fn` of a known model."""

    model: KnownModel

    def __repr__(self) -> str:
        return f"{self.model!r}.evaluate"

    def __call__(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        """Return the metrics of a batch."""
        return self.model.compute_metrics(model, batch)


def check_function(name: str, fn: Any, call: str) -> None:
    """Raise TypeError unless this is a function that can be called so; see `check_is_function`."""
    check_is_function(name, fn, call)
    check_call(name, fn, call)


def check_is_function(name: str, fn: Any, call: str) -> None:
    """Raise TypeError unless this is a function; of a known model the message names the method to pass.

    Args:
      name: the name of the parameter: "init_fn", "loss_fn" or "eval_fn".
      fn: what the user passed for it.
      call: how the function is called, such as "init_fn(key)".
    """
    if isinstance(fn, KnownModel):
        method = {"init_fn": "init", "loss_fn": "loss", "eval_fn": "evaluate"}[name]
        raise TypeError(f"{name} must be a function {call}, got the model itself; pass model.{method}")
    if not callable(fn):
        raise TypeError(f"{name} must be a function {call}, got {type(fn).__name__}")


def check_call(name: str, fn: Any, call: str) -> None:
    """Raise TypeError for a function that takes other arguments, such as another method of a known model."""
    _check_method(name, fn, call)
    _check_parameters(name, fn, call)


def _check_method(name: str, fn: Any, call: str) -> None:
    """Raise TypeError for another method of a known model than that which is meant."""
    methods = {InitOf: "init", LossOf: "loss", EvaluateOf: "evaluate"}
    own = {"init_fn": "init", "loss_fn": "loss", "eval_fn": "evaluate"}.get(name)
    given = methods.get(type(unwrap(fn)))
    if own is not None and given not in (None, own):
        raise TypeError(f"{name} must be a function {call}, got model.{given}; pass model.{own}")


def _check_parameters(name: str, fn: Any, call: str) -> None:
    """Raise TypeError for a function that can't be called in this way."""
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

    Other wrappers are left alone, even those that say what they wrap: they may compute something else.
    """
    while True:
        if isinstance(fn, functools.partial) and not fn.args and not fn.keywords:
            fn = fn.func
        elif isinstance(fn, jax.stages.Wrapped) and hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            return fn


def known_loss(fn: Callable[..., Any]) -> KnownModel | None:
    """Return the model whose `loss` a function is; None for any other function."""
    fn = unwrap(fn)
    return fn.model if isinstance(fn, LossOf) else None


def known_evaluate(fn: Callable[..., Any]) -> KnownModel | None:
    """Return the model whose `evaluate` a function is; None for any other function."""
    fn = unwrap(fn)
    return fn.model if isinstance(fn, EvaluateOf) else None


class ModelRun(NamedTuple):
    """A known model whose `init` or `loss` ran, and the shapes that it returned or received."""

    model: KnownModel
    tree: PyTree


class _Runs:
    """A list with an identity, which makes it part of the key under which JAX caches a traced function."""

    def __init__(self) -> None:
        self.found: list[ModelRun] = []


# Functions under jax.jit are traced again where this differs, so that no model hides in a program that JAX remembers.
_runs = jax.make_user_context(default_value=None)


@contextmanager
def models_run() -> Iterator[list[ModelRun]]:
    """Collect the known models whose `init` or `loss` runs inside, in the order in which they run.

    A context around this one collects them, too.
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
