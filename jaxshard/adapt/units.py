"""What the adapters of modules share: the pair of the contract, and weights that wait until their module runs.

An engine knows no module library. It hands `run` a model in which the parameters of units are `Pending`, and the
adapter turns them into weights (`gathered`) inside a `jax.checkpoint` around each unit, whose policy the engine gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxshard.adapt.offer import run_as_offered
from jaxshard.adapt.stacked import evaluation
from jaxshard.core.known_model import KnownModel
from jaxshard.core.loss import Max, Mean, Model, Sum, as_loss
from jaxshard.core.tree import map_with_path, path_str, raise_all
from jaxshard.core.types import InitFn, LossFn, PyTree

Units = tuple[type, ...]
Save = Callable[..., Any]


class Adapted(KnownModel):
    """A module with its loss: unpacks as the pair `init_fn, loss_fn`; `run` is what an engine looks into."""

    loss_fn: Callable[..., Any]

    def __iter__(self) -> Iterator[InitFn | LossFn]:
        yield self.init
        yield self.loss

    def compute_loss(self, model: PyTree, batch: PyTree, key: jax.Array | None) -> Any:
        """Return the loss of a training batch, with the module's new state."""
        return run_as_offered(self, model, batch, key, lambda: self.run(model, batch, key))

    def compute_metrics(self, model: PyTree, batch: PyTree) -> dict[str, Mean | Sum | Max]:
        """Return {"loss": js.Mean} and the loss's metrics, computed without keys; changes of state are dropped."""
        return evaluation(self.run(model, batch, None))

    def run(self, model: PyTree, batch: PyTree, key: jax.Array | None, *, units: Units = (), save: Save | None = None):
        """The loss; the parameters of `units` are gathered while each runs. Without a key: evaluation."""
        raise NotImplementedError

    def unit_params(self, units: Units, params: PyTree) -> PyTree:
        """For every parameter whether a unit owns it; an error by name for units that can't be."""
        raise NotImplementedError


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Pending:
    """A parameter of a unit as it is stored, the sink of its gradient, and `use(stored, sink) -> weight`."""

    stored: jax.Array
    sink: jax.Array | None
    use: Callable[[jax.Array, jax.Array | None], jax.Array]

    def __getitem__(self, _: Any) -> Any:
        raise ValueError(
            "units: a parameter of a unit was used while that unit does not run (it is shared with another module, or "
            "used by another method than __call__ of an NNX module); leave its class out of units"
        )

    __jax_array__ = property(lambda self: self[()])

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        return (self.stored, self.sink), self.use

    @classmethod
    def tree_unflatten(cls, use: Any, children: tuple[Any, Any]) -> Pending:
        return cls(*children, use)


def is_pending(x: Any) -> bool:
    return isinstance(x, Pending)


def gathered(tree: PyTree) -> PyTree:
    """The tree with weights instead of what is pending."""
    return jax.tree.map(lambda x: x.use(x.stored, x.sink) if is_pending(x) else x, tree, is_leaf=is_pending)


def joined(params: PyTree, state: dict[str, Any]) -> PyTree:
    """What an adapter's `init` returns."""
    return Model(params, state) if state else params


def parted(model: PyTree) -> tuple[PyTree, dict[str, Any]]:
    """(params, state), the state {} where there is none."""
    return (model.params, model.state) if isinstance(model, Model) else (model, {})


def call_loss(loss_fn: Callable[..., Any], model: Any, batch: PyTree, *, train: bool) -> Any:
    """The user's loss, told whether this is training if it has a parameter `train`."""
    parameter = inspect.signature(loss_fn).parameters.get("train")
    told = parameter is not None and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    return loss_fn(model, batch, train=train) if told else loss_fn(model, batch)


def check_loss(who: str, loss_fn: Any) -> None:
    """Raises unless this is a function `loss(model, batch)`, with `train` or without."""
    if not callable(loss_fn):
        raise TypeError(f"{who}: loss must be a function loss(model, batch), got {type(loss_fn).__name__}")
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError as error:
        try:
            inspect.signature(loss_fn).bind(None, None, train=True)
        except TypeError:
            raise TypeError(
                f"{who}: loss must be a function loss(model, batch) or loss(model, batch, train), got "
                f"{getattr(loss_fn, '__name__', 'one')}{inspect.signature(loss_fn)}: {error}; random keys are handled "
                "behind the model"
            ) from None


def with_state(output: Any, state: dict[str, Any]) -> Any:
    """What the user's loss returned, with the module's new state."""
    loss = as_loss(output)
    if loss.state is not None:
        raise ValueError(
            "the loss returned js.Loss(state=...), but the adapter carries the module's state itself; leave state out"
        )
    return replace(loss, state=state) if state else output


def dim_names_of(who: str, params: PyTree, found: dict[tuple[Any, ...], tuple[Any, ...]]) -> PyTree:
    """For every parameter a name or None per dimension, from the metadata found under its path (none: no names)."""
    problems: list[str] = []

    def names(path: Any, x: Any) -> tuple[str | None, ...]:
        mine = found.get(tuple(part.key for part in path), ())
        if len(mine) > x.ndim or not all(name is None or isinstance(name, str) for name in mine):
            problems.append(f"{path_str(path)} {list(x.shape)}: {mine}")
        return mine + (None,) * (x.ndim - len(mine))

    named = map_with_path(names, params)
    raise_all(problems, ValueError, f"{who}: every dimension of a parameter takes one name or None, but not")
    return named


def zeros_of(batch: PyTree) -> PyTree:
    """A batch of the same shapes and dtypes without values."""
    return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(x)), batch)
