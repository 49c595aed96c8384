"""`js.linen`: a Flax Linen module and its loss as the pair `init_fn`, `loss_fn`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
from flax import errors
from flax import linen as nn

from jaxshard.adapt.units import (
    Adapted,
    Save,
    Units,
    call_loss,
    check_loss,
    dim_names_of,
    gathered,
    is_pending,
    joined,
    parted,
    with_state,
    zeros_of,
)
from jaxshard.core.tree import raise_all
from jaxshard.core.types import PyTree

_INSPECTED = "intermediates"


def linen(module: nn.Module, loss: Callable[..., Any], batch: PyTree) -> Linen:
    """The pair `init_fn, loss_fn` of a Linen module, with its mutable collections and random streams behind them.

    Args:
      module: what you would call `init` and `apply` on.
      loss: `loss(model, batch) -> scalar | js.Mean | js.Loss`. `model` is called as the module is, without variables,
        keys and `mutable`: `model(x, train=True)`, `model(x, method="encode")`. A loss that has a parameter `train`
        is told True in training and False in evaluation.
      batch: an example batch, arrays or ShapeDtypeStructs: `init` runs the loss on zeros of these shapes, so that
        whatever the loss calls is initialised.

    The parameters lose their metadata boxes; the names in those are the `dim_names` of the layout. All other
    collections that `init` makes (batch statistics, caches, carries) are the model's state, written back after each
    step; "intermediates", and collections that the loss asks for (`out, sown = model(x, mutable=["losses"])`), are
    not. State with a row per row of the batch needs `js.auto()`: under `js.explicit()` a device sees its rows only.

    Every random stream draws from the step's key, as `module.apply(variables, x, rngs={"params": key})` does (Flax
    takes that stream for every name without one); a second call in one loss from that key folded with 1, and so on.
    Evaluation has no key: a module that still asks for one raises.

    Raises:
      TypeError: no Linen module, no function, a loss of other arguments.
      ValueError: a loss that calls nothing with parameters, or something that `init` did not reach.
    """
    if isinstance(module, type) or not isinstance(module, nn.Module):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(
            f"js.linen: module must be an instance of a flax.linen Module such as nn.Dense(8), got {got}; an NNX "
            "module is for js.nnx"
        )
    check_loss("js.linen", loss)
    return Linen(module, loss, batch)


@dataclass(frozen=True, eq=False)
class Linen(Adapted):
    """A Linen module with its loss; see `linen`. `init_fn, loss_fn = Linen(...)` unpacks the methods init and loss."""

    module: nn.Module
    loss_fn: Callable[..., Any]
    batch: PyTree

    def make_params(self, key: jax.Array) -> PyTree:
        """What `module.init(key, ...)` draws, unboxed: params, or js.Model(params, state of the other collections)."""
        variables = nn.unbox(self._boxed(key))
        params = variables.pop("params", None)
        if not params:
            raise ValueError(
                f"js.linen: {type(self.module).__name__} has no parameters: nothing that the loss called on the "
                "example batch has any; call model(...) in the loss"
            )
        return joined(params, variables)

    def apply(self, model: PyTree, *args: Any, **kwargs: Any) -> Any:
        """`module.apply` on what `init` returned, without keys; changes of state are dropped."""
        return LinenModel(self.module, model, None)(*args, **kwargs)

    def dim_names(self, params: PyTree) -> PyTree:
        """For every parameter the names in its metadata (`nn.with_logical_partitioning`, `nn.with_partitioning`)."""
        boxed = jax.eval_shape(self._boxed, jax.random.key(0))["params"]
        return dim_names_of("js.linen", params, names_in(boxed))

    def run(
        self, model: PyTree, batch: PyTree, key: jax.Array | None, *, units: Units = (), save: Save | None = None
    ) -> Any:
        """The loss and the module's new state. See `Adapted.run`."""
        called = LinenModel(self.module, model, key)
        with nn.intercept_methods(_gather_inside(units, save)):
            output = call_loss(self.loss_fn, called, batch, train=key is not None)
        return with_state(output, called.state)

    def unit_params(self, units: Units, params: PyTree) -> PyTree:
        """For every parameter whether a unit owns it: those under the path of an outermost unit that the loss calls."""
        raise_all(
            (one.__name__ for one in units if not issubclass(one, nn.Module)),
            TypeError,
            "units: a js.linen model is made of flax.linen Modules, which these classes are not",
        )
        found: dict[tuple[str, ...], tuple[nn.Module, PyTree]] = {}
        with nn.intercept_methods(_outermost(units, lambda call, module, _: _note(found, call, module))):
            jax.eval_shape(self._boxed, jax.random.key(0))
        problems = []
        for one in units:
            owned = [own for module, own in found.values() if isinstance(module, one)]
            if not owned:
                problems.append(f"{one.__name__}: never runs in the loss, or only inside another unit")
            elif not any(owned):
                problems.append(f"{one.__name__}: has no parameters")
        for path, (module, own) in found.items():
            held = params
            for name in path:
                held = held.get(name, {})
            if own and jax.tree.map(jnp.shape, own) != jax.tree.map(jnp.shape, held):
                problems.append(
                    f"{type(module).__name__} at {'/'.join(path)}: its parameters are stacked (nn.scan, nn.vmap); "
                    "describe such a model with js.Stacked"
                )
        raise_all(problems, ValueError, "units: every one must be a module that runs by itself and has parameters")
        return jax.tree_util.tree_map_with_path(
            lambda path, _: any(tuple(part.key for part in path)[: len(unit)] == unit for unit in found), params
        )

    def _boxed(self, key: jax.Array) -> dict[str, Any]:
        """All variables, with their metadata."""
        fresh = LinenInit(self.module, key)
        call_loss(self.loss_fn, fresh, zeros_of(self.batch), train=True)
        return fresh.variables


class LinenModel:
    """The model in a user's loss: called as the module is; its state goes from one call to the next."""

    def __init__(self, module: nn.Module, model: PyTree, key: jax.Array | None):
        self._module, self._key, self._calls = module, key, 0
        self._params, self.state = parted(model)

    @property
    def params(self) -> PyTree:
        """All parameters, whole."""
        return gathered(self._params)

    def __call__(self, *args: Any, method: Any = None, mutable: str | Sequence[str] = (), **kwargs: Any) -> Any:
        """`module.apply(variables, *args, ...)`; (output, collections) with `mutable`."""
        asked = _names(mutable)
        filters = [*self.state, *asked] or False
        try:
            output = self._module.apply(
                {"params": self._params, **self.state}, *args,
                rngs=self._next_key(), method=method, mutable=filters, **kwargs,
            )  # fmt: skip
        except (errors.ScopeParamNotFoundError, errors.ScopeCollectionNotFound) as error:
            raise ValueError(
                f"js.linen: a module was never initialised: {error}; init runs the loss on the example batch, so the "
                "loss must call, in training too, every module that evaluation or another batch calls"
            ) from error
        except errors.InvalidRngError as error:
            if self._key is not None:
                raise
            raise ValueError(
                f"js.linen: evaluation has no random key: {error}; give the loss a parameter `train` for the model's "
                "train=train (or deterministic=not train), and call apply with train=False"
            ) from error
        if not filters:
            return output
        output, new = output
        self.state = {name: new.get(name, old) for name, old in self.state.items()}
        return (output, {name: new.get(name, {}) for name in asked}) if asked else output

    def _next_key(self) -> dict[str, jax.Array] | None:
        if self._key is None:
            return None
        self._calls += 1
        return {"params": self._key if self._calls == 1 else jax.random.fold_in(self._key, self._calls - 1)}


class LinenInit:
    """The model in a user's loss while its variables are made: what `module.init` does, call by call."""

    def __init__(self, module: nn.Module, key: jax.Array):
        self._module, self._key = module, key
        self.variables: dict[str, Any] = {}

    @property
    def params(self) -> PyTree:
        return nn.unbox(self.variables.get("params", {}))

    def __call__(self, *args: Any, method: Any = None, mutable: str | Sequence[str] = (), **kwargs: Any) -> Any:
        asked = _names(mutable)

        def call(scope: Any) -> Any:
            module = self._module.clone(parent=scope)
            bound = method if callable(method) else getattr(module, method or "__call__")
            return bound(module, *args, **kwargs) if callable(method) else bound(*args, **kwargs)

        wanted = flax.core.DenyList([name for name in (_INSPECTED,) if name not in asked])
        made = flax.core.apply(call, mutable=wanted, flags={"initializing": True})
        output, new = made(self.variables, rngs={"params": self._key})
        self.variables = {name: new[name] for name in new if name not in asked}
        return (output, {name: new.get(name, {}) for name in asked}) if asked else output


def names_in(boxed: PyTree) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """The names in the metadata boxes of a tree, by path."""
    boxes = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    return {
        tuple(part.key for part in path): tuple(box.names) for path, box in boxes if isinstance(box, nn.Partitioned)
    }


def _names(mutable: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(mutable, str):
        return (mutable,)
    if isinstance(mutable, Sequence) and all(isinstance(name, str) for name in mutable):
        return tuple(mutable)
    raise TypeError(f"js.linen: mutable must be names of collections such as ['losses'], got {mutable!r}")


Interceptor = Callable[..., Any]


def _outermost(units: Units, around: Callable[[Callable[[], Any], nn.Module, Any], Any]) -> Interceptor:
    """An interceptor that puts `around(call, module, bound)` around every call of a unit not inside another unit."""
    inside = False

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        nonlocal inside
        if inside or not isinstance(context.module, units) or context.method_name == "setup":
            return next_fun(*args, **kwargs)
        inside = True
        try:
            return around(
                lambda: next_fun(*args, **kwargs),
                context.module,
                lambda module: getattr(module, context.method_name)(*args, **kwargs),
            )
        finally:
            inside = False

    return intercept


def _gather_inside(units: Units, save: Save | None) -> Interceptor:
    """Units gather their own parameters, forward and again backward; their arguments are saved."""

    def around(call: Callable[[], Any], module: nn.Module, bound: Callable[[nn.Module], Any]) -> Any:
        if not any(map(is_pending, jax.tree.leaves(module.variables.get("params", {}), is_leaf=is_pending))):
            return call()
        return nn.remat(nn.map_variables(bound, "params", gathered), policy=save)(module)

    return _outermost(units, around)


def _note(found: dict[tuple[str, ...], tuple[nn.Module, PyTree]], call: Callable[[], Any], module: nn.Module) -> Any:
    output = call()
    assert module.scope is not None, "a method that runs is bound"
    found[tuple(module.scope.path)] = (module, nn.unbox(dict(module.variables.get("params", {}))))
    return output
