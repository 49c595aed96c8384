"""`js.stack`: Flax modules, unmodified, as a `Stacked` model of identical blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx as flax_nnx

from jaxshard.adapt.compat import names_in_boxes
from jaxshard.adapt.linen import LinenInit, LinenModel
from jaxshard.adapt.nnx import Nnx
from jaxshard.adapt.stacked import Stacked
from jaxshard.adapt.units import call_loss, check_loss, dim_names_of, zeros_of
from jaxshard.core.jaxpr import Program, assign, needed_equations
from jaxshard.core.loss import Loss, Mean, Model
from jaxshard.core.tree import BLOCKS, paths, raise_all
from jaxshard.core.types import PyTree

_BLOCK = "block"


def stack(block: Any, num_blocks: int, loss: Callable[..., Any], batch: PyTree = None, **parts: Any) -> StackedModules:
    """A `Stacked` model of `num_blocks` modules like `block`, between other modules; none of them is changed.

        def loss(model, batch):
            x = model.embed(batch["tokens"])
            logits = model.head(model.blocks(x))
            return js.Mean(...)

        model = js.stack(Block(512), 12, loss, batch, embed=nn.Embed(256, 512), head=nn.Dense(256))

    Args:
      block: a Linen module that returns what it receives, or for NNX a function `lambda rngs: Block(512, rngs=rngs)`.
      num_blocks: how many, each with parameters of its own.
      loss: `loss(model, batch) -> js.Mean | js.Loss`, as `js.linen` and `js.nnx` take it (with `train` or without).
        The parts are attributes of `model`, called as they are; `model.blocks(x, ...)`, once, runs all blocks one
        after the other, on the same further arguments: `block(x, mask, train=True)`. Arrays among those (masks,
        positions) travel with the activations.
      batch: an example batch, arrays or ShapeDtypeStructs; Linen modules are initialised by the loss on it.
      **parts: the other modules by name, all Linen or all NNX like `block`.

    The parameters are {"blocks": stacked [num_blocks, ...], and each part's under its name}. Block i is drawn as
    `block.init(key_i, ...)` or `block(nnx.Rngs(key_i))`. The names in metadata are the `dim_names` of the layout.
    Random streams are those of `js.linen` and `js.nnx`, for every block and part from a key of its own.

    An engine runs the loss up to `model.blocks` where the embedding is, and again from there where the head is: what
    the first half made and the second one uses is computed twice, and may not be random.

    Raises:
      TypeError: no modules, modules of both kinds, a loss of other arguments, no batch for Linen.
      ValueError: a module with state (batch statistics, caches); a loss that does not call `model.blocks` once.
    """
    check_loss("js.stack", loss)
    wrong = [name for name in parts if name in (_BLOCK, BLOCKS)]
    raise_all(wrong, ValueError, f"js.stack: {BLOCKS!r} and {_BLOCK!r} are the blocks; give this part another name")
    modules = {_BLOCK: block, **parts}
    linen = {name: isinstance(module, nn.Module) for name, module in modules.items()}
    raise_all(
        (
            f"{name}: {_describe(module)}"
            for name, module in modules.items()
            if not linen[name] and not _makes_nnx(module)
        ),
        TypeError,
        "js.stack: a part must be an instance of a flax.linen Module, or for NNX a function that makes the module, "
        "such as lambda rngs: nnx.Linear(2, 3, rngs=rngs)",
    )
    if len(set(linen.values())) > 1:
        kinds = ", ".join(f"{name} is {'Linen' if linen[name] else 'NNX'}" for name in modules)
        raise TypeError(f"js.stack: the modules must be of one kind: {kinds}")
    if not linen[_BLOCK]:
        return StackedModules(_NnxParts({name: Nnx(make, loss) for name, make in modules.items()}), num_blocks, loss)
    if batch is None:
        raise TypeError("js.stack: Linen modules are initialised on an example batch: js.stack(block, n, loss, batch)")
    return StackedModules(_LinenParts(modules, loss, batch), num_blocks, loss)


def _makes_nnx(module: Any) -> bool:
    if isinstance(module, type):
        return issubclass(module, flax_nnx.Module)
    return callable(module) and not isinstance(module, flax_nnx.Module)


def _describe(module: Any) -> str:
    return f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"


class StackedModules(Stacked):
    """Modules as a `Stacked` model; see `stack`."""

    stacked_for_user = True

    def __init__(self, parts: _LinenParts | _NnxParts, num_blocks: int, loss_fn: Callable[..., Any]):
        super().__init__(self._embed, self._block, self._head, num_blocks, parts.init)
        self.parts, self.loss_fn = parts, loss_fn

    def dim_names(self, params: PyTree) -> PyTree:
        """For every parameter the names in its metadata; the blocks' first dimension is that of the blocks."""
        made = jax.eval_shape(self.parts.init, jax.random.key(0))
        named = dim_names_of("js.stack", made, self.parts.names())
        blocks = jax.tree.map(lambda _, names: (BLOCKS, *names), made[_BLOCK], named[_BLOCK])
        return {name: blocks if name == BLOCKS else named[name] for name in params}

    def _bind(self, params: PyTree, key: jax.Array | None) -> Bound:
        keys = {name: None if key is None else jax.random.fold_in(key, i) for i, name in enumerate(sorted(params))}
        return Bound({name: self.parts.bind(name, params[name], keys[name]) for name in params})

    def _embed(self, params: PyTree, batch: PyTree, key: jax.Array | None) -> Activations:
        def reach(*args: Any, **kwargs: Any) -> None:
            raise _Reached(args, kwargs)

        bound = self._bind(params, key)
        try:
            call_loss(self.loss_fn, Parts(bound.called, reach), batch, train=key is not None)
        except _Reached as reached:
            bound.check()
            return Activations.of(reached.args_, reached.kwargs_)
        raise ValueError("js.stack: the loss must call model.blocks(x), which it did not")

    def _block(self, params: PyTree, x: Activations, key: jax.Array | None) -> Activations:
        bound = Bound({_BLOCK: self.parts.bind(_BLOCK, params, key)})
        args, kwargs = x.arguments()
        y = bound.called[_BLOCK](*args, **kwargs)
        bound.check()
        return replace(x, x=y)

    def _head(self, params: PyTree, x: Activations, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
        def run(params: PyTree, x: PyTree, batch: PyTree, before: Any, key: Any) -> Any:
            halves = [self._bind(params, before), self._bind(params, key)]
            ran: list[bool] = []

            def blocks(*_: Any, **__: Any) -> Any:
                if ran:
                    raise ValueError("js.stack: the loss must call model.blocks(x) once, but called it again")
                ran.append(True)
                model.parts_ = halves[1].called
                return x

            model = Parts(halves[0].called, blocks)
            output = call_loss(self.loss_fn, model, batch, train=key is not None)
            for half in halves:
                half.check()
            return output

        args = (params, x.x, batch, key, key)
        program = Program.trace(run, *args)
        _, used = needed_equations(program.eqns, jax.tree.leaves(program.out), set())
        if not used.isdisjoint(jax.tree.leaves(program.args[3])):
            raise ValueError(
                "js.stack: after model.blocks the loss uses what it drew at random before, which the head would draw "
                "again, and other numbers; pass it through the blocks, or draw it after them"
            )
        output: Mean | Loss = program.run(program.out, assign(program.args, args))
        return output


class Parts:
    """The model in a user's loss: its parts as attributes, and `blocks`, which runs all blocks."""

    def __init__(self, parts: dict[str, Any], blocks: Callable[..., Any]):
        self.parts_, self.blocks = parts, blocks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "parts_":
            raise AttributeError(name)
        if name not in self.parts_:
            known = ", ".join(f"model.{part}" for part in (*self.parts_, BLOCKS))
            raise AttributeError(f"js.stack: the model has no part {name!r}, only {known}; pass {name}=... to js.stack")
        return self.parts_[name]


class Bound:
    """Modules with their weights: `called` by name, and a check at the end that nothing but weights was needed."""

    def __init__(self, bound: dict[str, tuple[Any, Callable[[], Any]]]):
        self.called = {name: called for name, (called, _) in bound.items()}
        self.checks = [check for _, check in bound.values()]

    def check(self) -> None:
        for check in self.checks:
            check()


class _Reached(BaseException):
    """The loss got to the blocks. No Exception, so that no handler in a user's loss takes it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        if not args:
            raise TypeError("js.stack: model.blocks needs the activations as its first argument: model.blocks(x)")
        self.args_, self.kwargs_ = args, kwargs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Activations:
    """What flows from block to block: the activations `x`, and the further arguments that every block receives.

    `arrays` are the arrays among those; `form` is (their tree, every other leaf and None for an array), static.
    """

    x: PyTree
    arrays: list[Any]
    form: Any = field(metadata={"static": True})

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Activations:
        leaves, tree = jax.tree.flatten((args[1:], kwargs))
        arrays = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]
        static = tuple(None if array else leaf for array, leaf in zip(arrays, leaves, strict=True))
        try:
            hash(static)
        except TypeError as error:
            raise TypeError(
                f"js.stack: the arguments of model.blocks must be arrays or values that compare: {error}"
            ) from error
        return cls(args[0], [leaf for array, leaf in zip(arrays, leaves, strict=True) if array], (tree, static))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tree, static = self.form
        arrays = iter(self.arrays)
        args, kwargs = tree.unflatten([next(arrays) if leaf is None else leaf for leaf in static])
        return (self.x, *args), kwargs


@dataclass(frozen=True, eq=False)
class _LinenParts:
    """Linen modules by name."""

    modules: dict[str, nn.Module]
    loss_fn: Callable[..., Any]
    batch: PyTree

    def init(self, key: jax.Array) -> PyTree:
        """The parameters of every part, and of one block."""
        made = {name: nn.unbox(variables) for name, variables in self._boxed(key).items()}
        states = {name: {kind: x for kind, x in made[name].items() if kind != "params"} for name in made}
        _check_no_state(states)
        if not made[_BLOCK].get("params"):
            raise ValueError("js.stack: the block has no parameters, or the loss did not call model.blocks(x)")
        return {name: variables.get("params", {}) for name, variables in made.items()}

    def bind(self, name: str, params: PyTree, key: jax.Array | None) -> tuple[Any, Callable[[], None]]:
        return LinenModel(self.modules[name], params, key), lambda: None

    def names(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        made = jax.eval_shape(self._boxed, jax.random.key(0))
        return names_in_boxes({name: variables.get("params", {}) for name, variables in made.items()})

    def _boxed(self, key: jax.Array) -> dict[str, Any]:
        """The variables of every part by name, with their metadata."""
        keys = jax.random.split(key, len(self.modules))
        fresh = {name: LinenInit(self.modules[name], k) for name, k in zip(sorted(self.modules), keys)}
        parts = {name: one for name, one in fresh.items() if name != _BLOCK}
        call_loss(self.loss_fn, Parts(parts, fresh[_BLOCK]), zeros_of(self.batch), train=True)
        return {name: one.variables for name, one in fresh.items()}


@dataclass(frozen=True, eq=False)
class _NnxParts:
    """NNX modules by name."""

    modules: dict[str, Nnx]

    def init(self, key: jax.Array) -> PyTree:
        """The parameters of every part, and of one block."""
        keys = jax.random.split(key, len(self.modules))
        made = {name: self.modules[name].make_params(k) for name, k in zip(sorted(self.modules), keys)}
        _check_no_state({name: model.state for name, model in made.items() if isinstance(model, Model)})
        return made

    def bind(self, name: str, params: PyTree, key: jax.Array | None) -> tuple[Any, Callable[[], Any]]:
        return self.modules[name].bind(params, key)

    def names(self) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        return {(name, *path): names for name, one in self.modules.items() for path, names in one.names.items()}


def _check_no_state(states: dict[str, PyTree]) -> None:
    raise_all(
        (f"{name}: {path}" for name, state in states.items() for path in paths(state)),
        ValueError,
        "js.stack: a model of blocks has no state, so every variable must be a parameter, unlike these (batch "
        "statistics, caches); normalise with LayerNorm or RMSNorm, or use js.linen or js.nnx",
    )
