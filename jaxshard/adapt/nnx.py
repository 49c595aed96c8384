"""`js.nnx`: turn a Flax NNX module and its loss into the pair `init_fn`, `loss_fn`.

An NNX module is an object that holds its arrays, while a `TrainState` holds arrays in trees. So `nnx.split` splits a
module once, under `jax.eval_shape`, into a `ModuleForm`, which has everything but the values, and trees. Every call of
the loss merges the form with the current arrays into a new module:

    form + params + random streams + state  ->  module  ->  the user's loss  ->  nnx.split(module)  ->  new state

So a change that a loss makes to its module is lost after the call, unless it is a change of variables, which the last
split returns as the new state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from jaxshard.adapt.compat import Around, intercept_calls, names_of_variable, without_eager_placement
from jaxshard.adapt.contracted import contracted_in_modules
from jaxshard.adapt.unchanged import Values, run_unchanged
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
)
from jaxshard.core.keys import is_key, neighbour
from jaxshard.core.layout import join_model, split_model
from jaxshard.core.tree import path_str, raise_all
from jaxshard.core.types import PyTree


def nnx(
    make_module: Callable[[flax_nnx.Rngs], flax_nnx.Module],
    loss: Callable[..., Any],
    *,
    state: Declared | None = None,
) -> Nnx:
    """Turn a Flax NNX module and its loss into the pair `init_fn, loss_fn`.

    The pair handles the module's variables and random streams.

    Parameters: a nested dict of the values of every `nnx.Param` ("layers/0/attn/query/kernel"). `js.tensor` splits
    dimensions by the names in their sharding metadata (`nnx.with_partitioning`).

    State: all other variables (`nnx.BatchStat`, `nnx.Cache`, your own) except `nnx.Intermediate`, written back after
    each step. A variable with a row for each row of the batch needs `js.auto()`, since under `js.explicit()` a device
    sees only its own rows. Plain Python attributes that a call changes are not kept.

    Random streams are neither trained nor kept: in each call of the loss, stream i (in the order of `nnx.RngState`)
    starts from the step's key folded with i, at count 0. A loss with a parameter `rngs` or `key` receives another
    `nnx.Rngs` or key, to pass to modules as an argument (`model(x, rngs=rngs)`); None in evaluation.

    Args:
      make_module: `make_module(rngs: nnx.Rngs) -> nnx.Module`, for example `lambda rngs: MLP(64, rngs=rngs)`.
      loss: `loss(module, batch) -> scalar | js.Mean | js.Loss`. The module is in training mode (`module.train()`)
        while training, and in evaluation mode (`module.eval()`) in evaluation. If the loss has a parameter `train`, it
        is True in training and False in evaluation; `rngs` and `key` are None in evaluation. The batch is global under
        `js.auto()`, one device's rows under `js.explicit()`.
      state: how to combine variables of the state over devices and micro-batches, by path: {"stats/count": "sum"} adds
        the changes on all of them to the old value, "max" takes the maximum. All other arrays are combined as described
        at `js.Loss`: running averages by their mean, equal values unchanged.

    Returns:
      An `Nnx`, which unpacks as `init_fn, loss_fn` and also has `evaluate`, for `js.make_eval_step`, and `apply`.

    Raises:
      TypeError: `make_module` is not a function that makes an NNX module, or `loss` does not take these arguments.
        Later, in use: the module holds raw arrays, which are neither trained nor kept.
      ValueError: later, in use: the module has no parameters, its call makes or changes parameters, or it draws random
        numbers in evaluation.

    Example:
          def loss(module, batch):
              logits = module(batch["x"])
              losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
              return js.Mean(losses.sum(), losses.size)

          init_fn, loss_fn = js.nnx(lambda rngs: MLP(64, rngs=rngs), loss)
          layout = js.layout(js.fsdp(), mesh, init_fn, tx)
          step = js.make_step(loss_fn, tx, layout)
    """
    if isinstance(make_module, flax_nnx.Module) or not callable(make_module):
        raise TypeError(
            "js.nnx: make_module must be a function of nnx.Rngs that makes the module, such as "
            f"lambda rngs: nnx.Linear(2, 3, rngs=rngs), got {type(make_module).__name__}"
        )
    check_loss("js.nnx", loss, ("train", "key", "rngs"))
    check_declared("js.nnx", state or {})
    return Nnx(make_module, loss, state or {})


class ModuleForm(NamedTuple):
    """The structure of an NNX module: everything but the values of its variables.

    Attributes:
      graph: Flax's `GraphDef`: classes, static attributes, and where in the module each variable is.
      params: the tree structure of the state of all `nnx.Param`s.
      streams: the tree structure of the random streams.
      state: the tree structure of all other variables.
      random: shapes and dtypes of the streams' keys and counts, in the order of their leaves.
      modules: (path, class) of every submodule.
      names: {path of a parameter: names of its dimensions in its sharding metadata, () for none}.
      contracted: {path of a kernel: "contracted", "spatial" or None for each dimension}: the dimensions that its layer
        sums over, and the window of a convolution.
    """

    graph: Any
    params: Any
    streams: Any
    state: Any
    random: list[jax.ShapeDtypeStruct]
    modules: list[tuple[tuple[Any, ...], type]]
    names: dict[tuple[Any, ...], tuple[Any, ...]]
    contracted: dict[tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Nnx(Adapted):
    """An NNX module with its loss, made by `js.nnx`; it unpacks as the pair `init_fn, loss_fn`.

    Attributes:
      make_module: makes the module from `nnx.Rngs`.
      loss_fn: the user's `loss(module, batch)`.
      declared: the argument `state` of `js.nnx`: {path of a variable: "sum" or "max"}.
    """

    make_module: Callable[[flax_nnx.Rngs], flax_nnx.Module]
    loss_fn: Callable[..., Any]
    declared: Declared = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"js.nnx({getattr(self.make_module, '__qualname__', type(self.make_module).__name__)})"

    def make_params(self, key: jax.Array) -> PyTree:
        """Make the module; return its values as nested dicts: the parameters, or js.Model(parameters, state)."""
        return _model_of(self._make(key))

    def to_module(self, model: PyTree, key: jax.Array) -> flax_nnx.Module:
        """Make a module in evaluation mode that holds the given parameters and state; its streams draw from `key`."""
        module = self._merge(model, _seed_streams(self._form.random, key))
        module.eval()
        return module

    def from_module(self, module: Any) -> PyTree:
        """Return the parameters and the state of a module as nested dicts, like `init`; random streams are left out."""
        if not isinstance(module, flax_nnx.Module):
            raise TypeError(
                "js.from_module: the layout's model is of js.nnx, so expected an nnx.Module, got "
                f"{type(module).__name__}"
            )
        return _model_of(module)

    def apply(self, model: PyTree, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        """Call a method of the module, in evaluation mode, with the parameters and state that `init` returned.

        There are no random keys, and changes of the state are dropped.
        """
        params, state = split_model(model)

        def run(params: PyTree) -> tuple[Any, Values]:
            bound = self.bind(join_model(params, state), None)
            output = getattr(bound.module, method)(*args, **kwargs)
            return output, bound.after()[1]

        return run_unchanged(run, params)

    def dim_names(self, params: PyTree) -> PyTree:
        """Return for every parameter a tuple of names of its dimensions, as `js.tensor` needs them.

        The names come from the parameter's sharding metadata. Without metadata, a layer such as LinearGeneral says
        which dimensions of its kernel are contracted (`contracted.py`).
        """
        return dim_names_of("js.nnx", params, self.names, self.contracted)

    @property
    def names(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Return {path of a parameter: names of its dimensions in its sharding metadata, () for none}."""
        return self._form.names

    @property
    def contracted(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Return which dimensions of each kernel are contracted (summed over) by its layer.

        The result is {path of a kernel: "contracted", "spatial" or None for each dimension}.
        """
        return self._form.contracted

    def bind(self, model: PyTree, key: jax.Array | None) -> Bound:
        """Make a module that holds the given parameters and state, in training or evaluation mode.

        Args:
          model: parameters, or js.Model(params, state).
          key: the random key of the step; None for evaluation mode.
        """
        streams = _seed_streams(self._form.random, key)
        module = self._merge(model, streams)
        module.eval() if key is None else module.train()

        def after() -> tuple[dict[str, Any], Values]:
            _, params, drawn, new = _split(module)
            # A stream counts its draws: the array of its count is replaced by every draw.
            counts = [x for x in jax.tree.leaves(drawn) if not is_key(x.dtype)]
            if key is None and any(a is not b for a, b in zip(counts, [x for x in streams if not is_key(x.dtype)])):
                raise ValueError(
                    "js.nnx: evaluation has no random key, but the module draws numbers in it; let it draw only "
                    "while training, as nnx.Dropout does (deterministic=True, which module.eval() sets)"
                )
            return flax_nnx.to_pure_dict(new), _values(params)

        return Bound(module, after)

    def _merge(self, model: PyTree, streams: list[jax.Array]) -> flax_nnx.Module:
        """Make a module that holds the given parameters, state, and keys and counts of its random streams."""
        form, (params, state) = self._form, split_model(model)
        merged = (
            form.params.unflatten(map(jnp.asarray, jax.tree.leaves(params))),
            form.streams.unflatten(streams),
            form.state.unflatten(map(jnp.asarray, jax.tree.leaves(state))),
        )
        # copy=True makes new variables; else the next trace of a loss would find the tracers of this one in them.
        module: flax_nnx.Module = flax_nnx.merge(form.graph, *merged, copy=True)
        return module

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
        params, state = split_model(model)

        def run(params: PyTree) -> tuple[Any, Values]:
            module, after = self.bind(join_model(params, state), key)
            calls = UnitCalls(save)
            intercept_calls(module, units, calls.around)  # `bind` made this module for this call, so it may be changed
            own = None if key is None else neighbour(key)
            rngs = None if own is None else flax_nnx.Rngs(neighbour(own))
            with explain_missing_key("js.nnx", self.loss_fn, key):
                output = call_loss(self.loss_fn, module, batch, train=key is not None, key=own, rngs=rngs)
            new, values = after()
            calls.check_ran(units)
            return attach_state("js.nnx", output, state, new, self.declared), values

        return run_unchanged(run, params)

    def unit_params(self, units: Units, params: PyTree) -> PyTree:
        """Return a tree like `params`: True for each parameter of a unit (a submodule whose class is in `units`).

        Raises:
          TypeError: a class is not an NNX module.
          ValueError: the module has no submodule of a class, or none of them has parameters.
        """
        raise_all(
            (one.__name__ for one in units if not issubclass(one, flax_nnx.Module)),
            TypeError,
            "units: a js.nnx model is made of flax.nnx Modules, which these classes are not",
        )
        found = [(path, kind) for path, kind in self._form.modules if issubclass(kind, units)]

        def owners(path: Any) -> list[type]:
            keys = tuple(part.key for part in path)
            return [kind for unit, kind in found if keys[: len(unit)] == unit]

        owned = [owners(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        problems = []
        for one in units:
            if not any(issubclass(kind, one) for _, kind in found):
                problems.append(f"{one.__name__}: the module has none")
            elif not any(issubclass(kind, one) for kinds in owned for kind in kinds):
                problems.append(f"{one.__name__}: has no parameters")
        raise_all(problems, ValueError, WHAT_UNITS_ARE)
        return jax.tree.unflatten(jax.tree.structure(params), [bool(kinds) for kinds in owned])

    def _make(self, key: jax.Array) -> flax_nnx.Module:
        # The metadata names dimensions, not mesh axes, so NNX must not shard variables by it.
        with without_eager_placement():
            module = self.make_module(flax_nnx.Rngs(key))
        if not isinstance(module, flax_nnx.Module):
            raise TypeError(
                f"js.nnx: make_module must return a flax.nnx Module, got {type(module).__name__}; a Linen module is "
                "for js.linen"
            )
        return module

    @functools.cached_property
    def _form(self) -> ModuleForm:
        # Traced, so that learning the shapes computes nothing. Values that are not arrays leave the trace in this list.
        found: list[tuple[Any, ...]] = []

        def trace(key: jax.Array) -> PyTree:
            module = self._make(key)
            _check_arrays(module)
            graph, *states = _split(module)
            modules = [(path, x) for path, x in flax_nnx.iter_graph(module) if isinstance(x, flax_nnx.Module)]
            kinds, contracted = [(path, type(x)) for path, x in modules], contracted_in_modules(modules)
            names = {path: names_of_variable(variable) for path, variable in flax_nnx.to_flat_state(states[0])}
            for state in states:  # `bind` puts the leaves of a plain dict into the structure of a State
                pure = jax.tree.leaves(flax_nnx.to_pure_dict(state))
                assert all(a is b for a, b in zip(jax.tree.leaves(state), pure, strict=True)), "another order of leaves"
            found.append((graph, *map(jax.tree.structure, states), kinds, names, contracted))
            return states[1]

        random = jax.tree.leaves(jax.eval_shape(trace, jax.random.key(0)))
        ((graph, params, streams, state, kinds, names, contracted),) = found
        return ModuleForm(graph, params, streams, state, random, kinds, names, contracted)


class Bound(NamedTuple):
    """An NNX module with the values of one step, for one call of the loss.

    Attributes:
      module: the module.
      after: to be called after the loss; returns (the new state, [(path, value)] of all parameters), and raises a
        ValueError if the module drew random numbers without a key.
    """

    module: flax_nnx.Module
    after: Callable[[], tuple[dict[str, Any], Values]]


def _split(module: flax_nnx.Module) -> tuple[Any, Any, Any, Any]:
    """Split a module into (graph, parameters, random streams, state); sown intermediates are dropped."""
    parts: Any = flax_nnx.split(module, flax_nnx.Param, flax_nnx.RngState, flax_nnx.Intermediate, ...)
    graph, params, streams, _, state = parts
    return graph, params, streams, state


def _model_of(module: flax_nnx.Module) -> PyTree:
    """Return the values of a module as nested dicts: its parameters, or js.Model(parameters, state)."""
    _, params, _, state = _split(module)
    if not jax.tree.leaves(params):
        raise ValueError("js.nnx: the module has no parameters: none of its variables is an nnx.Param")
    return join_model(flax_nnx.to_pure_dict(params), flax_nnx.to_pure_dict(state) or ())


def _check_arrays(module: flax_nnx.Module) -> None:
    """Raise TypeError if a module has arrays that are not in an `nnx.Variable`.

    They would become constants of the traced program, neither trained nor kept.
    """
    flat = {path for path, _ in flax_nnx.to_flat_state(flax_nnx.state(module))}
    raise_all(
        (
            "/".join(map(str, path))
            for path, x in flax_nnx.iter_graph(module)
            if isinstance(x, jax.Array) and path not in flat and not any(path[: len(p)] == p for p in flat)
        ),
        TypeError,
        "js.nnx: these arrays are neither trained nor kept; make each an nnx.Param, another nnx.Variable or "
        "nnx.data(array)",
    )


def _seed_streams(shapes: list[Any], key: jax.Array | None) -> list[jax.Array]:
    """Make the keys and counts of the random streams: the key of stream i is `key` folded with i, all counts are 0.

    `shapes` has the shapes and dtypes of keys and counts, in the order of the leaves.
    """
    # In evaluation any key will do: `Bound.after` refuses a module that used it.
    root, values, streams = jax.random.key(0) if key is None else key, [], 0
    for x in shapes:
        if is_key(x.dtype):
            mine = jax.random.fold_in(root, streams)
            values.append(jax.random.split(mine, x.shape) if x.shape else mine)
            streams += 1
        else:
            values.append(jnp.zeros(x.shape, x.dtype))
    return values


def _values(params: Any) -> Values:
    """Return (path, value) of every parameter in an NNX state of `nnx.Param`s, such as ("layers/0/kernel", array)."""
    return [(path_str(path), x) for path, x in jax.tree_util.tree_leaves_with_path(flax_nnx.to_pure_dict(params))]


def _is_object(x: Any) -> bool:
    return isinstance(x, flax_nnx.Pytree)


class UnitCalls:
    """Wrapper that runs each call of a unit (a submodule of a class in `units`) in a `jax.checkpoint`.

    A unit inside another unit has no `jax.checkpoint` of its own.

    Args:
      save: the policy of the `jax.checkpoint`.
    """

    def __init__(self, save: Save | None):
        self._save, self._inside = save, False
        self._ran: set[type] = set()

    def around(self, path: tuple[Any, ...], unit: flax_nnx.Module) -> Around:
        """Return the function `run(unit, call, args, kwargs)` that replaces calls of the unit at `path`.

        It is passed to `intercept_calls`.
        """
        shapes = _param_shapes(unit)

        def run(unit: flax_nnx.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            if _param_shapes(unit) != shapes:  # inside of nnx.scan a unit has one layer's slice of its parameters
                where = f"{type(unit).__name__} at {'/'.join(map(str, path))}"
                raise_all([f"{where}: {STACKED_UNIT.format('nnx.scan, nnx.vmap')}"], ValueError, WHAT_UNITS_ARE)
            self._inside = True
            try:
                return self._run(unit, args, kwargs)
            finally:
                self._inside = False

        return run

    def _run(self, unit: flax_nnx.Module, args: Any, kwargs: Any) -> Any:
        flat: Any = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
        leaves, tree = flat
        # An nnx.Rngs among the arguments counts its draws, so it goes in and out like the unit. Split both together,
        # since the unit may hold the same Rngs.
        objects = (unit, tuple(x for x in leaves if _is_object(x)))
        parts: Any = flax_nnx.split(objects, flax_nnx.Param, ...)
        graph, params, rest = parts
        known = {id(x) for x in jax.tree.leaves(params)}

        def is_known(_: Any, variable: Any) -> bool:
            return all(id(x) in known for x in jax.tree.leaves(variable))

        # jax.checkpoint needs a function of arrays, so the unit goes in and out as its parts. All changed values are
        # returned; `run_unchanged` then refuses changed parameters.
        def body(rest: PyTree) -> tuple[Any, PyTree]:
            copies = flax_nnx.merge(graph, params, rest, copy=True)
            module, handed = copies[0], iter(copies[1])
            args, kwargs = tree.unflatten([next(handed) if _is_object(x) else x for x in leaves])
            output = module(*args, **kwargs)
            parts: Any = flax_nnx.split(copies, flax_nnx.All(flax_nnx.Param, is_known), ...)
            return output, parts[2]

        output, new = jax.checkpoint(body, policy=self._save)(rest)
        flax_nnx.update(objects, new)  # batch statistics and counts of random streams
        self._ran.add(type(unit))
        return output

    def check_ran(self, units: Units) -> None:
        """Raise a ValueError that names every class in `units` that never ran in the loss."""
        raise_all(
            (f"{one.__name__}" for one in units if not any(issubclass(kind, one) for kind in self._ran)),
            ValueError,
            "units: these never ran in the loss, or only inside another unit (it is __call__ that gathers)",
        )


def _param_shapes(module: flax_nnx.Module) -> dict[str, tuple[int, ...]]:
    return {path: jnp.shape(x) for path, x in _values(flax_nnx.state(module, flax_nnx.Param))}
