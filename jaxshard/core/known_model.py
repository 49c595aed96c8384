"""Models whose structure the library knows, and the functions by which it recognises them.

`model.init`, `model.loss` and `model.evaluate` of a known model are not bound methods but small objects, `InitOf`,
`LossOf` and `EvaluateOf`, with an attribute `model`. So a known model is recognised by `isinstance`, not by names, and
also inside `jax.jit`. A user's function that *calls* such an object (a lambda, a loss with a penalty) is recognised
while it is traced: `models_run` lists the known models whose functions ran.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxshard.core.loss import Max, Mean, Sum
from jaxshard.core.tree import abstract
from jaxshard.core.types import PyTree


class KnownModel:
    """The base class of models whose structure the library knows, such as `js.Stacked`.

    A subclass implements `make_params`, `compute_loss` and `compute_metrics`. Users call `init`, `loss` and `evaluate`,
    which wrap these methods in objects that remember the model.
    """

    stacked_for_user: bool = False
    """True if the user wrote single blocks that the library stacked: the optimizer must update them one by one."""

    @property
    def init(self) -> InitOf:
        """The function `init(key)`: returns the parameters, or js.Model(params, state) for a model with a state."""
        return InitOf(self)

    @property
    def loss(self) -> LossOf:
        """The function `loss(model, batch, key)`: returns the loss of the rows that it receives."""
        return LossOf(self)

    @property
    def evaluate(self) -> EvaluateOf:
        """The function `evaluate(model, batch)`: returns {"loss": js.Mean} and other metrics, without a random key."""
        return EvaluateOf(self)

    def make_params(self, key: jax.Array) -> PyTree:
        """Make the parameters, or `js.Model(params, state)`, from a random key. Subclasses implement it for `init`."""
        raise NotImplementedError

    def compute_loss(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        """Compute the loss of a batch: a `js.Mean`, a scalar or a `js.Loss`. Subclasses implement it for `loss`."""
        raise NotImplementedError

    def compute_metrics(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        """Compute the loss and metrics of a batch, by name. Subclasses implement it for `evaluate`."""
        raise NotImplementedError

    def separate_labels(self, batch: PyTree) -> PyTree:
        """Return the batch with inputs and labels as separate arrays, as `js.context` needs them.

        From {"tokens": [B, T + 1]} make {"tokens": [B, T], "targets": [B, T]}, for example.
        """
        return batch

    def explain_errors(self, what: str) -> AbstractContextManager[None]:
        """Make a context for a user's function of this model, in which errors of the user's library are explained.

        `what` names the function in these errors: "the function".
        """
        return nullcontext()

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
        """Return a tuple of dimension names for every parameter, such as ("embed", "mlp").

        A name may be None, and the tuple may be shorter than the shape.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class InitOf:
    """The `init_fn` of a known model (a model whose structure the library knows).

    A call makes the parameters and records the model in the enclosing `models_run`.
    """

    model: KnownModel

    def __repr__(self) -> str:
        return f"{self.model!r}.init"

    def __call__(self, key: jax.Array) -> PyTree:
        made = self.model.make_params(key)
        _note(self.model, made)
        return made


@dataclass(frozen=True)
class LossOf:
    """The `loss_fn` of a known model (a model whose structure the library knows).

    A call computes the loss and records the model in the enclosing `models_run`.
    """

    model: KnownModel

    def __repr__(self) -> str:
        return f"{self.model!r}.loss"

    def __call__(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        _note(self.model, model)
        return self.model.compute_loss(model, batch, key)


@dataclass(frozen=True)
class EvaluateOf:
    """The `eval_fn` of a known model (a model whose structure the library knows)."""

    model: KnownModel

    def __repr__(self) -> str:
        return f"{self.model!r}.evaluate"

    def __call__(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        return self.model.compute_metrics(model, batch)


def check_function(name: str, fn: Any, call: str) -> None:
    """Raise TypeError unless `fn` is a function that can be called as `call`, such as "init_fn(key)".

    Args:
      name: the name of the parameter: "init_fn", "loss_fn" or "eval_fn".
      fn: the user's argument.
      call: how the function is called.
    """
    check_is_function(name, fn, call)
    check_call(name, fn, call)


def check_is_function(name: str, fn: Any, call: str) -> None:
    """Raise TypeError unless `fn` is a function. If it is a model itself, the message names the method to pass.

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
    """Raise TypeError if the function `fn` can't be called as `call`, such as "loss_fn(model, batch, key)".

    This also refuses the wrong method of a model, such as `model.init` for `loss_fn`.
    """
    _check_method(name, fn, call)
    _check_parameters(name, fn, call)


def _check_method(name: str, fn: Any, call: str) -> None:
    """Raise TypeError for the wrong method of a `KnownModel`, such as `model.init` for `loss_fn`."""
    methods = {InitOf: "init", LossOf: "loss", EvaluateOf: "evaluate"}
    own = {"init_fn": "init", "loss_fn": "loss", "eval_fn": "evaluate"}.get(name)
    given = methods.get(type(unwrap(fn)))
    if own is not None and given not in (None, own):
        raise TypeError(f"{name} must be a function {call}, got model.{given}; pass model.{own}")


def _check_parameters(name: str, fn: Any, call: str) -> None:
    """Raise TypeError if the signature of `fn` does not allow a call such as "loss_fn(model, batch, key)"."""
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
    """Return the function inside `jax.jit` and inside `functools.partial` without arguments.

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
    """Return the model whose method `loss` is `fn`, if it is a `KnownModel`; None for any other function."""
    fn = unwrap(fn)
    return fn.model if isinstance(fn, LossOf) else None


def known_evaluate(fn: Callable[..., Any]) -> KnownModel | None:
    """Return the model whose method `evaluate` is `fn`, if it is a `KnownModel`; None for any other function."""
    fn = unwrap(fn)
    return fn.model if isinstance(fn, EvaluateOf) else None


class ModelRun(NamedTuple):
    """A call of a known model's `init` or `loss`.

    Attributes:
      model: the known model.
      tree: the shapes of the model's parameters and state, which `init` returned or `loss` received.
    """

    model: KnownModel
    tree: PyTree


class _Runs:
    """A list of `ModelRun` that is equal only to itself.

    It is a part of the key of JAX's trace cache. So each block traces its functions again, and no model is missed.
    """

    def __init__(self) -> None:
        self.found: list[ModelRun] = []


# JAX traces functions under jax.jit again where this differs, so that a cached jaxpr never hides a model.
_runs = jax.make_user_context(default_value=None)


@contextmanager
def models_run() -> Iterator[list[ModelRun]]:
    """Return a context that yields a list, which gets a `ModelRun` for each call of a known model's `init` or `loss`.

    A known model is one whose structure the library knows, such as `js.Stacked`. An enclosing `models_run` block gets
    the calls as well.
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
