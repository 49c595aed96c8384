"""`js.linen`: turn a Flax Linen module and its loss into the pair `init_fn`, `loss_fn`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors
from flax import linen as nn
from flax.core import unfreeze

from jaxshard.adapt.compat import Names, Path, initialize_through, names_in_boxes, without_box_placement
from jaxshard.adapt.contracted import contracted_in_calls
from jaxshard.adapt.units import (
    STACKED_UNIT,
    WHAT_UNITS_ARE,
    Adapted,
    Declared,
    Save,
    Units,
    attach_state,
    call_loss,
    check_declared,
    check_loss,
    dim_names_of,
    explain_missing_key,
    zeros_of,
)
from jaxshard.core.keys import neighbour
from jaxshard.core.layout import join_model, split_model
from jaxshard.core.loss import Model
from jaxshard.core.tree import raise_all
from jaxshard.core.types import PyTree

_NEVER_STATE = "intermediates"
"""The collection for values that modules sow for inspection only."""


def linen(module: nn.Module, loss: Callable[..., Any], batch: PyTree, *, state: Declared | None = None) -> Linen:
    """Turn a Flax Linen module and its loss into the pair `init_fn, loss_fn`.

    The pair handles the module's mutable collections and random keys.

    State: all collections that `init` makes except "params" (batch statistics, caches, carries) are the model's state,
    written back after each step. Excluded are "intermediates" and collections that the loss asks for
    (`out, sown = model(x, mutable=["losses"])`). A carry with a row for each row of the batch needs `js.auto()`, since
    under `js.explicit()` a device sees only its own rows.

    Random keys: every random stream draws from the step's key, as in `module.apply(variables, x, rngs={"params":
    key})`: Flax falls back to the stream "params" for all other names. If a loss calls the model several times, call n
    after the first draws from the key folded with n. Evaluation has no key, and a module that needs a key raises. A
    loss with a parameter `key` receives another key, to pass to modules as an argument (`model(x, key)`); None in
    evaluation.

    Names: `js.tensor` splits dimensions by the names in the metadata boxes of parameters
    (`nn.with_logical_partitioning`, `nn.with_partitioning`). Nothing else in the boxes is used, and the parameters that
    `init_fn` returns are without boxes.

    Args:
      module: the module, not yet initialised.
      loss: `loss(model, batch) -> scalar | js.Mean | js.Loss`. Call `model` like the module, but without variables and
        keys: `model(x, train=True)`, `model(x, method="encode")`. If the loss has a parameter `train`, it is True in
        training and False in evaluation; likewise `key` is a random key in training and None in evaluation. The batch
        is global under `js.auto()`, one device's rows under `js.explicit()`.
      batch: an example batch, arrays or `jax.ShapeDtypeStruct`s. `init` runs the loss on zeros of these shapes, which
        initialises every module that the loss calls.
      state: how to combine arrays of the state over devices and micro-batches, by path: {"stats/count": "sum"} adds the
        changes on all of them to the old value, "max" takes the maximum. All other arrays are combined as described at
        `js.Loss`: running averages by their mean, equal values unchanged.

    Returns:
      A `Linen`, which unpacks as `init_fn, loss_fn` and also has `evaluate`, for `js.make_eval_step`, and `apply`.

    Raises:
      TypeError: `module` is not an instance of a Linen module, or `loss` does not take these arguments.
      ValueError: later, in use: the loss calls no module with parameters, or calls a module that `init` did not
        initialise.

    Example:
          def loss(model, batch):
              logits = model(batch["x"], train=True)
              losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
              return js.Mean(losses.sum(), losses.size)

          init_fn, loss_fn = js.linen(MLP(64), loss, batch)
          layout = js.layout(js.fsdp(), mesh, init_fn, tx)
          step = js.make_step(loss_fn, tx, layout)
    """
    if isinstance(module, type) or not isinstance(module, nn.Module):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise TypeError(
            f"js.linen: module must be an instance of a flax.linen Module such as nn.Dense(8), got {got}; an NNX "
            "module is for js.nnx"
        )
    check_loss("js.linen", loss, ("train", "key"))
    check_declared("js.linen", state or {})
    return Linen(module, loss, batch, state or {})


@dataclass(frozen=True, eq=False)
class Linen(Adapted):
    """A Linen module with its loss, made by `js.linen`; it unpacks as the pair `init_fn, loss_fn`.

    Attributes:
      module: the module, unbound.
      loss_fn: the user's `loss(model, batch)`.
      batch: the example batch on which `init` runs the loss.
      declared: the argument `state` of `js.linen`: {path of an array of the state: "sum" or "max"}.
    """

    module: nn.Module
    loss_fn: Callable[..., Any]
    batch: PyTree
    declared: Declared = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"js.linen({type(self.module).__name__})"

    def make_params(self, key: jax.Array) -> PyTree:
        """Initialise the module: return its parameters, or js.Model(parameters, other collections), without boxes."""
        return self._model_of(self._boxed(key))

    @contextmanager
    def explain_errors(self, what: str) -> Iterator[None]:
        """Explain Flax's errors of `module.apply(model, ...)`, which takes variables, not what `init` returns."""
        try:
            yield
        except (errors.ApplyScopeInvalidVariablesTypeError, errors.ScopeCollectionNotFound, AttributeError) as error:
            # Of a js.Model, Flax asks for the items of a dict.
            if isinstance(error, AttributeError) and not (error.name == "items" and isinstance(error.obj, Model)):
                raise
            raise TypeError(
                f"{what} calls the Flax module itself, without its variables ({error}): call apply of the object that "
                "js.linen returned, model.apply(v, x) with model = js.linen(...)"
            ) from error

    def to_module(self, model: PyTree, key: jax.Array) -> dict[str, Any]:
        """Return the variables that `module.apply` takes: {"params": ..., and the other collections}."""
        params, state = split_model(model)
        return {"params": params, **dict(state)}

    def from_module(self, module: Any) -> PyTree:
        """Convert variables, with or without metadata boxes, to the result of `init`."""
        return self._model_of(check_variables("the layout's model is of js.linen", module))

    def _model_of(self, variables: Mapping[str, Any]) -> PyTree:
        """Split variables, which may be in metadata boxes, into parameters and state."""
        with without_box_placement():
            state = dict(nn.unbox(variables))
        params, _ = state.pop("params", None), state.pop(_NEVER_STATE, None)
        if not params:
            raise ValueError(
                f"js.linen: {type(self.module).__name__} has no parameters: nothing that the loss called on the "
                "example batch has any; call model(...) in the loss"
            )
        return join_model(params, state or ())

    def apply(self, model: PyTree, *args: Any, **kwargs: Any) -> Any:
        """Call the module with the parameters and state that `init` returned, without random keys.

        Changes of the state are dropped.
        """
        return LinenModel(self.module, model, None)(*args, **kwargs)

    def dim_names(self, params: PyTree) -> PyTree:
        """Return for every parameter a tuple of names of its dimensions, as `js.tensor` needs them.

        The names come from the parameter's metadata box. Without a box, a layer such as DenseGeneral says which
        dimensions of its kernel are contracted (`contracted.py`).
        """
        contracted: dict[Path, Names] = {}
        boxed = jax.eval_shape(lambda key: self._boxed(key, contracted), jax.random.key(0))["params"]
        return dim_names_of("js.linen", params, names_in_boxes(boxed), contracted)

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
        called = LinenModel(self.module, model, key)
        own = None if key is None else neighbour(key)
        with nn.intercept_methods(_checkpoint_units(units, save)), explain_missing_key("js.linen", self.loss_fn, key):
            output = call_loss(self.loss_fn, called, batch, train=key is not None, key=own)
        return attach_state("js.linen", output, split_model(model)[1], called.state, self.declared)

    def unit_params(self, units: Units, params: PyTree) -> PyTree:
        """Return a tree like `params`: True for each parameter of a unit (a submodule whose class is in `units`).

        Raises:
          TypeError: a class is not a Linen module.
          ValueError: a unit never runs in the loss, or only inside another unit; it has no parameters, or stacked
            parameters (`nn.scan`, `nn.vmap`).
        """
        raise_all(
            (one.__name__ for one in units if not issubclass(one, nn.Module)),
            TypeError,
            "units: a js.linen model is made of flax.linen Modules, which these classes are not",
        )
        found: dict[tuple[str, ...], tuple[nn.Module, PyTree]] = {}
        with nn.intercept_methods(_outermost(units, lambda call, module, _: _record_unit(found, call, module))):
            jax.eval_shape(self._boxed, jax.random.key(0))
        problems = []
        for one in units:
            owned = [own for module, own in found.values() if isinstance(module, one)]
            if not owned:
                problems.append(f"{one.__name__}: never runs in the loss, or only inside another unit")
            elif not any(owned):
                problems.append(f"{one.__name__}: has no parameters")
        for path, (module, own) in found.items():
            # A unit under nn.scan sees one layer's slice, [8, 8] of what `params` has as [num_layers, 8, 8].
            held = params
            for name in path:
                held = held.get(name, {})
            if own and jax.tree.map(jnp.shape, own) != jax.tree.map(jnp.shape, held):
                where = f"{type(module).__name__} at {'/'.join(path)}"
                problems.append(f"{where}: {STACKED_UNIT.format('nn.scan, nn.vmap')}")
        raise_all(problems, ValueError, WHAT_UNITS_ARE)
        return jax.tree_util.tree_map_with_path(
            lambda path, _: any(tuple(part.key for part in path)[: len(unit)] == unit for unit in found), params
        )

    def _boxed(self, key: jax.Array, contracted: dict[Path, Names] | None = None) -> dict[str, Any]:
        """Initialise all variables, in their metadata boxes, by running the loss on zeros like the example batch.

        If `contracted` is a dict, add {path of a kernel: its contracted dimensions} for every layer that tells them.
        """
        fresh = LinenInit(self.module, key)
        call_loss(self.loss_fn, fresh, zeros_of(self.batch), train=True, key=neighbour(key))
        if contracted is not None:
            contracted.update(fresh.contracted)
        return fresh.variables


class LinenModel:
    """The model that a user's loss receives: it is called like the module, and supplies the variables and keys.

    Args:
      module: the module, unbound.
      model: parameters, or js.Model(params, state).
      key: the random key of the step; None in evaluation.

    Attributes:
      state: all collections but "params", {} if there are none. Each call updates them for the next call.
    """

    def __init__(self, module: nn.Module, model: PyTree, key: jax.Array | None):
        self._module, self._key, self._calls = module, key, 0
        self._params, state = split_model(model)
        self.state: dict[str, Any] = dict(state)

    @property
    def params(self) -> PyTree:
        """Return all parameters."""
        return self._params

    def __call__(self, *args: Any, method: Any = None, mutable: str | Sequence[str] = (), **kwargs: Any) -> Any:
        """Return `module.apply(variables, *args, ...)`; with `mutable`, return (output, {name: collection}).

        Collections of the state that the call changes are kept in `state`.
        """
        asked = _collection_names(mutable)
        filters = [*self.state, *asked] or False
        try:
            with without_box_placement():
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
    """The model that a user's loss receives during initialisation: each call initialises modules as `module.init` does.

    Attributes:
      variables: the variables that the calls have made so far, in their metadata boxes.
      contracted: {path of a kernel: `CONTRACTED`, `SPATIAL` or None for each dimension}, for layers that ran so far.
    """

    def __init__(self, module: nn.Module, key: jax.Array):
        self._module, self._key = module, key
        self.variables: dict[str, Any] = {}
        self.contracted: dict[Path, Names] = {}

    @property
    def params(self) -> PyTree:
        """Return the parameters that the calls have made so far."""
        return nn.unbox(self.variables.get("params", {}))

    def __call__(self, *args: Any, method: Any = None, mutable: str | Sequence[str] = (), **kwargs: Any) -> Any:
        """Call the module, and add the variables that this call initialises to `variables`.

        With `mutable`, return (output, {name: collection}).
        """
        asked = _collection_names(mutable)

        def call(module: nn.Module) -> Any:
            if callable(method):  # Coder.decode, which takes the module as its first argument
                return method(module, *args, **kwargs)
            return getattr(module, method or "__call__")(*args, **kwargs)

        leave_out = {_NEVER_STATE} - set(asked)
        with nn.intercept_methods(contracted_in_calls(self.contracted)):
            output, new = initialize_through(self._module, call, self.variables, self._key, leave_out)
        self.variables = {name: new[name] for name in new if name not in asked}
        return (output, {name: new.get(name, {}) for name in asked}) if asked else output


def check_variables(where: str, variables: Any) -> dict[str, Any]:
    """Return variables of a Linen module, frozen or not, as nested dicts; raise TypeError if they lack "params"."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise TypeError(
            f'js.from_module: {where}, so expected Linen variables {{"params": ...}}, got '
            + (
                f"a dict of {sorted(map(str, variables))}"
                if isinstance(variables, Mapping)
                else type(variables).__name__
            )
        )
    unfrozen: dict[str, Any] = unfreeze(dict(variables))
    return unfrozen


def _collection_names(mutable: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(mutable, str):
        return (mutable,)
    if isinstance(mutable, Sequence) and all(isinstance(name, str) for name in mutable):
        return tuple(mutable)
    raise TypeError(f"js.linen: mutable must be names of collections such as ['losses'], got {mutable!r}")


Interceptor = Callable[..., Any]


def _outermost(units: Units, around: Callable[[Callable[[], Any], nn.Module, Any], Any]) -> Interceptor:
    """Make a Linen interceptor that replaces each call of a unit (a submodule whose class is in `units`).

    A unit that runs inside another unit is called as usual.

    Args:
      units: the classes.
      around: `around(call, module, run_on)` replaces the call. `call()` makes the original call, and `run_on(module)`
        the same call on another copy of the module.
    """
    inside = False

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        nonlocal inside
        module, method = context.module, context.method_name
        # A class made by nn.remat or nn.jit runs an own function around the module, which is not a method of it.
        is_call = isinstance(module, units) and method != "setup" and hasattr(module, method)
        if inside or not is_call:
            return next_fun(*args, **kwargs)
        inside = True
        try:
            return around(
                lambda: next_fun(*args, **kwargs),
                module,
                lambda module: getattr(module, method)(*args, **kwargs),
            )
        finally:
            inside = False

    return intercept


def _checkpoint_units(units: Units, save: Save | None) -> Interceptor:
    """Make a Linen interceptor that runs each unit (a submodule of a class in `units`) in a `jax.checkpoint`.

    A unit inside another unit has no `jax.checkpoint` of its own. `save` is the policy.
    """

    def around(call: Callable[[], Any], module: nn.Module, run_on: Callable[[nn.Module], Any]) -> Any:
        # An instance without parameters, in a class of which others have some, has nothing to gather again.
        return nn.remat(run_on, policy=save)(module) if module.variables.get("params") else call()

    return _outermost(units, around)


def _record_unit(
    found: dict[tuple[str, ...], tuple[nn.Module, PyTree]], call: Callable[[], Any], module: nn.Module
) -> Any:
    output = call()
    # Recorded after the call, since the call makes the parameters.
    found[tuple(module.path)] = (module, nn.unbox(dict(module.variables.get("params", {}))))
    return output
