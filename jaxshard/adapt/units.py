"""The base class of `js.linen` and `js.nnx`, and units: submodules whose parameters are gathered only while they run.

A unit is a submodule whose class the user lists in `units=[Block]`. Engines know nothing about module libraries, and
adapters (`js.linen`, `js.nnx`) nothing about collectives. So the adapter wraps each unit in a `jax.checkpoint` with a
policy from the engine; the engine traces the loss and inserts the all-gathers of a unit's parameters inside of its
checkpoint (see `engines/pending.py`). The loss itself sees every parameter with its full shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.adapt.offer import run_as_offered
from jaxshard.adapt.stacked import evaluation
from jaxshard.core.known_model import KnownModel
from jaxshard.core.loss import Max, Mean, Sum, as_loss
from jaxshard.core.rules import ends_with
from jaxshard.core.tree import LAYERS, map_with_path, path_str, paths, raise_all, same_structure
from jaxshard.core.types import InitFn, LossFn, PyTree

Units = tuple[type, ...]
"""The classes of submodules that are units."""
Save = Callable[..., Any]
"""A policy for `jax.checkpoint`."""

WHAT_UNITS_ARE = "units: every one must be a module that runs by itself and has parameters"
STACKED_UNIT = "its parameters are stacked ({}); describe such a model with js.Stacked"


class Adapted(KnownModel):
    """A Flax module with its loss, which unpacks as the pair `init_fn, loss_fn`.

    A subclass implements `run`, `unit_params`, and the abstract methods of `KnownModel`.

    Attributes:
      loss_fn: the user's loss.
    """

    loss_fn: Callable[..., Any]

    def __iter__(self) -> Iterator[InitFn | LossFn]:
        yield self.init
        yield self.loss

    def compute_loss(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        """Return the loss of a training batch, with the module's new state.

        If a user's own loss calls this function, an engine may run the module on stored shards instead of the gathered
        weights in `model` (see `offer.py`).
        """
        return run_as_offered(self, model, batch, key, lambda: self.run(model, batch, key))

    def compute_metrics(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        """Return the loss, under the name "loss", and its metrics, computed in evaluation without random keys.

        Changes of the state are dropped.
        """
        return evaluation(self.run(model, batch, None))

    def run(
        self, model: PyTree, batch: PyTree, key: jax.Array | None, *, units: Units = (), save: Save | None = None
    ) -> Any:
        """Run the user's loss on the module.

        Args:
          model: parameters, or js.Model(params, state).
          batch: the batch: a device's own rows under `js.explicit`, else the global batch.
          key: the random key of the step; None in evaluation.
          units: classes of submodules; each submodule of these classes runs inside of a `jax.checkpoint`.
          save: the policy of these `jax.checkpoint`s.

        Returns:
          The output of the loss, with the module's new state if it has any.
        """
        raise NotImplementedError

    def unit_params(self, units: Units, params: PyTree) -> PyTree:
        """Return a tree like `params`: True for each parameter of a submodule whose class is in `units`.

        Raises:
          TypeError: a class is not a module class of this library.
          ValueError: for some class no submodule runs outside of other units, or none has parameters.
        """
        raise NotImplementedError


def call_loss(loss_fn: Callable[..., Any], model: Any, batch: PyTree, **options: Any) -> Any:
    """Call the user's loss; pass each option (`train`, `key`, `rngs`) only if the loss has a parameter of that name."""
    return loss_fn(model, batch, **{name: options[name] for name in _asked(loss_fn, options)})


def _asked(loss_fn: Callable[..., Any], options: Iterable[str]) -> list[str]:
    parameters = inspect.signature(loss_fn).parameters
    return [n for n in options if n in parameters and parameters[n].kind is not inspect.Parameter.POSITIONAL_ONLY]


def check_loss(who: str, loss_fn: Any, options: Sequence[str]) -> None:
    """Raise a TypeError unless `loss_fn` is a function of (model, batch), and perhaps of parameters in `options`.

    Args:
      who: the public function that errors name, such as "js.linen".
      loss_fn: the object to check.
      options: the names of the optional parameters.
    """
    if not callable(loss_fn):
        raise TypeError(f"{who}: loss must be a function loss(model, batch), got {type(loss_fn).__name__}")
    signature = inspect.signature(loss_fn)
    missing = [name for name in ("key", "rngs") if name in signature.parameters and name not in options]
    try:
        signature.bind(None, None, **dict.fromkeys(_asked(loss_fn, options)))
        problem = f"nothing is passed for {missing[0]!r}" if missing else ""
    except TypeError as error:
        problem = str(error)
    if problem:
        also = "" if "key" in options else "; the modules draw their random numbers themselves"
        raise TypeError(
            f"{who}: loss must be a function loss(model, batch), if need be with parameters named "
            f"{' or '.join(options)}, got {getattr(loss_fn, '__name__', 'one')}{signature}: {problem}{also}"
        )


@contextmanager
def explain_missing_key(who: str, loss_fn: Callable[..., Any], key: jax.Array | None) -> Iterator[None]:
    """Enter a context for calling a user's loss, which explains errors of a missing random key.

    In evaluation a loss receives None as its `key` or `rngs`. If the loss then raises a TypeError or AttributeError, a
    note about the missing key is added to the error. The note names `who`, the public function, such as "js.linen".
    """
    try:
        yield
    except (TypeError, AttributeError) as error:
        if key is None and (names := _asked(loss_fn, ("key", "rngs"))):
            error.add_note(
                f"{who}: evaluation has no random key, so the loss received {names[0]}=None; there draw from a key of "
                "your own, such as jax.random.key(0), or nothing at random"
            )
        raise


Declared = Mapping[str, str]
"""{end of the path of an array of a module's state: the rule that combines it over devices, "sum" or "max"}."""


def check_declared(who: str, declared: Any) -> None:
    """Raise a TypeError unless `declared` maps paths to "sum" or "max"; `who` is the function named in the message."""
    if not isinstance(declared, Mapping) or not all(rule in ("sum", "max") for rule in declared.values()):
        raise TypeError(
            f'{who}: state must be a dict such as {{"stats/count": "sum"}}, with "sum" or "max" for the path of an '
            f"array of the module's state, got {declared!r}"
        )


def attach_state(who: str, output: Any, old: PyTree, new: dict[str, Any], declared: Declared) -> Any:
    """Add the module's new state to the output of the user's loss.

    Args:
      who: the public function that error messages name, such as "js.linen".
      output: the output of the loss.
      old: the state before the loss; () or {} if the module has no state.
      new: the state after the loss.
      declared: {path of an array of the state: "sum" or "max"}, how to combine its values over devices.

    Raises:
      ValueError: the loss returned a state itself, or `declared` names an array that the state lacks.
    """
    loss = as_loss(output)
    if loss.state is not None:
        raise ValueError(
            "the loss returned js.Loss(state=...), but the adapter carries the module's state itself; leave state out, "
            f'and declare what is summed by its path: {who}(..., state={{"path": "sum"}})'
        )
    known = paths(new)
    raise_all(
        (name for name in declared if not any(ends_with(path, name) for path in known)),
        ValueError,
        f"{who}: state= names no array of the module's state ({', '.join(known) or 'it has none'})",
    )
    if not new:
        return output
    if not declared or not same_structure(old, new):  # the step refuses a state of another structure, leaf by leaf
        return replace(loss, state=new)
    rules = map_with_path(lambda path, _: _rule_for(path_str(path), declared), new)

    def contribute(rule: str, old: Any, new: Any) -> Any:
        return Sum(new - old) if rule == "sum" else Max(new) if rule == "max" else new

    def update(old: PyTree, combined: PyTree) -> PyTree:
        return jax.tree.map(lambda rule, old, new: old + new if rule == "sum" else new, rules, old, combined)

    return replace(loss, state=jax.tree.map(contribute, rules, old, new), update=update)


def _rule_for(path: str, declared: Declared) -> str:
    return next((rule for name, rule in declared.items() if ends_with(path, name)), "")


def dim_names_of(
    who: str,
    params: PyTree,
    annotated: dict[tuple[Any, ...], tuple[Any, ...]],
    contracted: dict[tuple[Any, ...], tuple[Any, ...]],
) -> PyTree:
    """Return a tree like `params` with a tuple of dimension names for each parameter: a name or None per dimension.

    Args:
      who: the public function that error messages name, such as "js.linen".
      params: arrays, or their shapes.
      annotated: {path of a parameter: names in its metadata, perhaps fewer than dimensions}.
      contracted: {path of a kernel: "contracted", "spatial" or None for each of its last dimensions}, from its layer;
        used if the metadata has no names. Any dimensions before these stack layers.

    Raises:
      ValueError: metadata with more names than the array has dimensions, or with a name that is not a string; names
        each array.
    """
    problems: list[str] = []

    def names(path: Any, x: Any) -> tuple[str | None, ...]:
        at = tuple(part.key for part in path)
        mine = annotated.get(at, ())
        if len(mine) > x.ndim or not all(name is None or isinstance(name, str) for name in mine):
            problems.append(f"{path_str(path)} {list(x.shape)}: {mine}")
        if any(name is not None for name in mine):
            return tuple(mine)
        of_layer = contracted.get(at, ())
        return (*(LAYERS,) * (x.ndim - len(of_layer)), *of_layer) if of_layer else (None,) * x.ndim

    named = map_with_path(names, params)
    raise_all(problems, ValueError, f"{who}: every dimension of a parameter takes one name or None, but not")
    return named


def zeros_of(batch: PyTree) -> PyTree:
    """Return a batch of zeros with the shapes and dtypes of `batch`, which may be ShapeDtypeStructs."""
    return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(x)), batch)
