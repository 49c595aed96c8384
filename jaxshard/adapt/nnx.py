"""`js.nnx`: a Flax NNX module and its loss as the pair `init_fn`, `loss_fn`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

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
)
from jaxshard.core.tree import path_str, raise_all
from jaxshard.core.types import PyTree


def nnx(make_module: Callable[[flax_nnx.Rngs], flax_nnx.Module], loss: Callable[..., Any]) -> Nnx:
    """The pair `init_fn, loss_fn` of an NNX module, with its variables and random streams behind them.

    Args:
      make_module: `make_module(rngs: nnx.Rngs) -> nnx.Module`, for example `lambda rngs: MLP(64, rngs=rngs)`.
      loss: `loss(module, batch) -> scalar | js.Mean | js.Loss`. The module is in training mode (`module.train()`), in
        evaluation in evaluation mode (`module.eval()`). A loss that has a parameter `train` is told which.

    The parameters are a nested dict of the values of every `nnx.Param` ("layers/0/attn/query/kernel"); the names in
    their sharding metadata are the `dim_names` of the layout. All other variables (`BatchStat`, `Cache`, your own) are
    the model's state, written back after each step, except `nnx.Intermediate`. State with a row per row of the batch
    needs `js.auto()`: under `js.explicit()` a device sees its rows only.

    Random streams are neither trained nor kept: before each loss stream i (in the order of `nnx.RngState`) starts
    from the step's key folded with i, at count 0. Plain Python attributes that a call changes are not kept.

    Raises:
      TypeError: no function that makes an NNX module, a loss of other arguments, a module with raw arrays.
      ValueError: a module without parameters, or whose call makes or changes some; evaluation that draws numbers.
    """
    if isinstance(make_module, flax_nnx.Module) or not callable(make_module):
        raise TypeError(
            "js.nnx: make_module must be a function of nnx.Rngs that makes the module, such as "
            f"lambda rngs: nnx.Linear(2, 3, rngs=rngs), got {type(make_module).__name__}"
        )
    check_loss("js.nnx", loss)
    return Nnx(make_module, loss)


class Form(NamedTuple):
    """What a module is made of, without values."""

    graph: Any
    params: Any
    streams: Any
    state: Any
    random: list[jax.ShapeDtypeStruct]
    modules: list[tuple[tuple[Any, ...], type]]
    names: dict[tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Nnx(Adapted):
    """An NNX module with its loss; see `nnx`. `init_fn, loss_fn = Nnx(...)` unpacks the methods init and loss."""

    make_module: Callable[[flax_nnx.Rngs], flax_nnx.Module]
    loss_fn: Callable[..., Any]

    def make_params(self, key: jax.Array) -> PyTree:
        """What `make_module(nnx.Rngs(key))` draws: params, or js.Model(params, state) of plain nested dicts."""
        _, params, _, state = _split(self._make(key))
        if not jax.tree.leaves(params):
            raise ValueError("js.nnx: the module has no parameters: none of its variables is an nnx.Param")
        return joined(flax_nnx.to_pure_dict(params), flax_nnx.to_pure_dict(state))

    def apply(self, model: PyTree, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        """The module in evaluation mode on what `init` returned, without keys; changes of state are dropped."""
        module, check = self._merge(model, None)
        module.eval()
        output = getattr(module, method)(*args, **kwargs)
        check()
        return output

    def dim_names(self, params: PyTree) -> PyTree:
        """For every parameter the names in its sharding metadata."""
        return dim_names_of("js.nnx", params, self._form.names)

    @property
    def names(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """The names in the sharding metadata of the parameters, by path."""
        return self._form.names

    def bind(self, model: PyTree, key: jax.Array | None) -> tuple[flax_nnx.Module, Callable[[], dict[str, Any]]]:
        """The module on what `init` returned, in evaluation mode without a key, and `check() -> its new state`."""
        module, check = self._merge(model, key)
        module.eval() if key is None else module.train()
        return module, check

    def run(
        self, model: PyTree, batch: PyTree, key: jax.Array | None, *, units: Units = (), save: Save | None = None
    ) -> Any:
        """The loss and the module's new state. See `Adapted.run`."""
        module, check = self.bind(model, key)
        gathering = _gather_inside(module, units, save)
        output = call_loss(self.loss_fn, module, batch, train=key is not None)
        state = check()
        if gathering is not None:
            gathering.check(units)
        return with_state(output, state)

    def unit_params(self, units: Units, params: PyTree) -> PyTree:
        """For every parameter whether a unit owns it."""
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
        raise_all(problems, ValueError, "units: every one must be a module that runs by itself and has parameters")
        return jax.tree.unflatten(jax.tree.structure(params), [bool(kinds) for kinds in owned])

    def _make(self, key: jax.Array) -> flax_nnx.Module:
        # The names in the metadata are those of dimensions, not of axes of a mesh: nothing is placed by them here.
        with flax_nnx.use_eager_sharding(False):
            module = self.make_module(flax_nnx.Rngs(key))
        if not isinstance(module, flax_nnx.Module):
            raise TypeError(
                f"js.nnx: make_module must return a flax.nnx Module, got {type(module).__name__}; a Linen module is "
                "for js.linen"
            )
        return module

    @functools.cached_property
    def _form(self) -> Form:
        found: list[tuple[Any, ...]] = []

        def trace(key: jax.Array) -> PyTree:
            module = self._make(key)
            _check_arrays(module)
            graph, *states = _split(module)
            modules = [(path, type(x)) for path, x in flax_nnx.iter_graph(module) if isinstance(x, flax_nnx.Module)]
            names = {path: _names(variable) for path, variable in flax_nnx.to_flat_state(states[0])}
            for state in states:
                pure = jax.tree.leaves(flax_nnx.to_pure_dict(state))
                assert all(a is b for a, b in zip(jax.tree.leaves(state), pure, strict=True)), "another order of leaves"
            found.append((graph, *map(jax.tree.structure, states), modules, names))
            return states[1]

        random = jax.tree.leaves(jax.eval_shape(trace, jax.random.key(0)))
        ((graph, params, streams, state, modules, names),) = found
        return Form(graph, params, streams, state, random, modules, names)

    def _merge(self, model: PyTree, key: jax.Array | None) -> tuple[flax_nnx.Module, Callable[[], dict[str, Any]]]:
        """The module with its values, and a function that returns its new state or raises for what it may not do."""
        form, (params, state) = self._form, parted(model)
        streams = _seeded(form.random, key)
        weights = [x if is_pending(x) else jnp.asarray(x) for x in jax.tree.leaves(params, is_leaf=is_pending)]
        merged = (
            form.params.unflatten(weights),
            form.streams.unflatten(streams),
            form.state.unflatten(map(jnp.asarray, jax.tree.leaves(state))),
        )
        module = flax_nnx.merge(form.graph, *merged, copy=True)
        before = _values(_split(module)[1])

        def check() -> dict[str, Any]:
            _, after, drawn, new = _split(module)
            _check_params(before, _values(after))
            counts = [x for x in jax.tree.leaves(drawn) if not _is_key(x)]
            if key is None and any(a is not b for a, b in zip(counts, [x for x in streams if not _is_key(x)])):
                raise ValueError(
                    "js.nnx: evaluation has no random key, but the module draws numbers in it; let it draw only "
                    "while training, as nnx.Dropout does (deterministic=True, which module.eval() sets)"
                )
            return flax_nnx.to_pure_dict(new)

        return module, check


def _split(module: flax_nnx.Module) -> tuple[Any, Any, Any, Any]:
    """(graph, parameters, random streams, state): what a module is made of but for what it sowed."""
    parts: Any = flax_nnx.split(module, flax_nnx.Param, flax_nnx.RngState, flax_nnx.Intermediate, ...)
    graph, params, streams, _, state = parts
    return graph, params, streams, state


def _names(variable: Any) -> tuple[Any, ...]:
    """The sharding metadata of a variable, under whichever name this version of Flax keeps it."""
    metadata = variable.get_metadata()
    for name in ("out_sharding", "sharding", "sharding_names"):
        names = metadata.get(name)
        if names is not None:
            return tuple(getattr(names, "spec", names))
    return ()


def _check_arrays(module: flax_nnx.Module) -> None:
    """Raises for raw arrays in a module, which Flax takes for constants while it is traced."""
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


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _seeded(shapes: list[Any], key: jax.Array | None) -> list[jax.Array]:
    """Values of the random state: stream i from the key folded with i, counts at zero."""
    root, values, streams = jax.random.key(0) if key is None else key, [], 0
    for x in shapes:
        if _is_key(x):
            mine = jax.random.fold_in(root, streams)
            values.append(jax.random.split(mine, x.shape) if x.shape else mine)
            streams += 1
        else:
            values.append(jnp.zeros(x.shape, x.dtype))
    return values


def _values(params: Any) -> dict[str, list[Any]]:
    """The arrays behind every parameter, to tell by identity whether it was set (Flax rebuilds what is pending)."""
    found = jax.tree_util.tree_leaves_with_path(flax_nnx.to_pure_dict(params), is_leaf=is_pending)
    return {path_str(path): jax.tree.leaves(x) for path, x in found}


def _check_params(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> None:
    raise_all(
        (
            f"{path}: " + ("set" if path in before else "was never initialised: made by a call")
            for path, arrays in after.items()
            if path not in before or any(a is not b for a, b in zip(before[path], arrays, strict=True))
        ),
        ValueError,
        "js.nnx: the loss made or changed parameters, which only the optimizer may; make every nnx.Param in the "
        "module's __init__, and what a call changes another nnx.Variable",
    )


# Units. A unit's instances get a subclass of their class, whose call gathers the parameters that are pending.


class Gathering:
    """Runs units one by one, outermost ones only, and knows which classes ran."""

    def __init__(self, save: Save | None):
        self.save, self.inside = save, False
        self.ran: set[type] = set()

    def run(self, unit: flax_nnx.Module, args: Any, kwargs: Any) -> Any:
        parts: Any = flax_nnx.split(unit, flax_nnx.Param, ...)
        graph, params, rest = parts

        def body(rest: PyTree) -> tuple[Any, PyTree]:
            module = flax_nnx.merge(graph, gathered(params), rest, copy=True)
            before = _values(flax_nnx.state(module, flax_nnx.Param))
            output = module(*args, **kwargs)
            parts: Any = flax_nnx.split(module, flax_nnx.Param, ...)
            _, after, new = parts
            _check_params(before, _values(after))
            return output, new

        self.inside = True
        try:
            output, new = jax.checkpoint(body, policy=self.save)(rest)
        finally:
            self.inside = False
        flax_nnx.update(unit, new)
        self.ran.add(type(unit))
        return output

    def check(self, units: Units) -> None:
        """Raises for units that did not run."""
        raise_all(
            (f"{one.__name__}" for one in units if not any(issubclass(kind, one) for kind in self.ran)),
            ValueError,
            "units: these never ran in the loss, or only inside another unit (it is __call__ that gathers)",
        )


_GATHERING = "_jaxshard_gathering"


def _gather_inside(module: flax_nnx.Module, units: Units, save: Save | None) -> Gathering | None:
    """Lets the units in a module, which is this trace's own copy, gather their own parameters."""
    if not units:
        return None
    gathering = Gathering(save)
    for _, node in list(flax_nnx.iter_graph(module)):
        if isinstance(node, units):
            kind: Any = type(node)
            object.__setattr__(node, "__class__", _gathering_class(kind))
            object.__setattr__(node, _GATHERING, gathering)
    return gathering


@functools.cache
def _gathering_class(cls: Any) -> Any:
    """The subclass of a unit's class, one for each, since every class of modules is registered for good."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        gathering: Gathering = getattr(self, _GATHERING)
        if gathering.inside:
            return cls.__call__(self, *args, **kwargs)
        return gathering.run(self, args, kwargs)

    return type(cls)(cls.__name__, (cls,), {"__call__": functools.wraps(cls.__call__)(call)})
