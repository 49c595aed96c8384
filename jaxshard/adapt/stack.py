"""`js.stack`: turn unmodified Flax modules into a `Stacked` model of identical blocks.

The user writes one loss, which is split at the call of `model.blocks` into the three functions that an engine needs:

    def loss(model, batch):
        x = model.embed(batch["tokens"])     embed: runs the loss; `blocks` raises `_BlocksReached` with x and the mask
        mask = batch["tokens"] > 0
        y = model.blocks(x, mask)            block: runs one module on x and mask
        logits = model.head(y)               head:  runs the loss again; `blocks` returns the y of the last block
        return js.Mean(...)

The function `head` runs the full loss. So a value from before `model.blocks` is computed again if it is used after the
blocks (a mask), and removed as dead code if it is not (the embedding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx as flax_nnx

from jaxshard.adapt.compat import Names, Path, names_in_boxes, without_box_placement
from jaxshard.adapt.linen import LinenInit, LinenModel, check_variables
from jaxshard.adapt.nnx import Nnx
from jaxshard.adapt.stacked import Stacked
from jaxshard.adapt.unchanged import Values, run_unchanged
from jaxshard.adapt.units import call_loss, check_loss, dim_names_of, zeros_of
from jaxshard.core.jaxpr import Program, assign, needed_equations
from jaxshard.core.loss import Loss, Mean, Model
from jaxshard.core.tree import BLOCKS, check_same_tree, paths, raise_all
from jaxshard.core.types import PyTree

_BLOCK = "block"


def stack(block: Any, num_blocks: int, loss: Callable[..., Any], batch: PyTree = None, **parts: Any) -> StackedModules:
    """Make a `js.Stacked` model of `num_blocks` modules like `block`, and other modules before and after them.

    The modules are not changed. Engines gather the parameters of one block at a time, and `js.pipelined` places blocks
    in stages.

    The parameters are a dict: the parameters of the blocks, stacked [num_blocks, ...], are under "blocks", and the
    parameters of every other module (a part) under its name. Block i is initialised by `block.init(key_i, ...)` or
    `block(nnx.Rngs(key_i))`. `js.tensor` splits dimensions by the names in the modules' metadata. Random streams work
    as in `js.linen` and `js.nnx`; every block and part has its own key.

    The loss runs twice: up to `model.blocks` for the embedding, and completely for the head, with `model.blocks`
    returning the output of the blocks. A value from before `model.blocks` that is used after it is computed twice, and
    must not be random.

    Args:
      block: a Linen module that returns an array of the shape that it receives, or for NNX a function that makes such a
        module, `lambda rngs: Block(512, rngs=rngs)`.
      num_blocks: the number of blocks, each with its own parameters.
      loss: `loss(model, batch) -> js.Mean | js.Loss`, as for `js.linen` and `js.nnx`; it may have a parameter `train`.
        The parts are attributes of `model`. Call `model.blocks(x, ...)` once: it runs all blocks in order, each with
        the same further arguments: `block(x, mask, train=True)`. Arrays among the further arguments (masks, positions)
        are passed along with the activations.
      batch: an example batch, arrays or `jax.ShapeDtypeStruct`s, on which the loss initialises Linen modules. Leave it
        out for NNX modules.
      **parts: the other modules by name, from the same library as `block`.

    Raises:
      TypeError: an argument is not a module, some modules are Linen and others NNX, the loss takes other arguments, or
        there is no batch for Linen modules.
      ValueError: a part is called "block" or "blocks". Later: a module has state (batch statistics, caches), or the
        loss does not call `model.blocks` exactly once.

    Example:
          def loss(model, batch):
              x = model.embed(batch["tokens"])
              logits = model.head(model.blocks(x))
              losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
              return js.Mean(losses.sum(), losses.size)

          model = js.stack(Block(512), 12, loss, batch, embed=nn.Embed(256, 512), head=nn.Dense(256))
          layout = js.layout(js.compose(js.fsdp(), js.pipeline()), mesh, model.init, tx)
          step = js.make_step(model.loss, tx, layout, engine=js.pipelined(microbatches=8))
    """
    check_loss("js.stack", loss, ("train",))
    wrong = [name for name in parts if name in (_BLOCK, BLOCKS)]
    raise_all(wrong, ValueError, f"js.stack: {BLOCKS!r} and {_BLOCK!r} are the blocks; give this part another name")
    modules = {_BLOCK: block, **parts}
    linen = {name: isinstance(module, nn.Module) for name, module in modules.items()}
    raise_all(
        (
            f"{name}: {_kind_of(module)}"
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


def _kind_of(module: Any) -> str:
    return f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"


class StackedModules(Stacked):
    """A `js.Stacked` model of Flax modules, made by `js.stack`.

    Attributes:
      parts: the block and the modules before and after the blocks.
      loss_fn: the user's `loss(model, batch)`.
    """

    stacked_for_user = True

    def __init__(self, parts: _LinenParts | _NnxParts, num_blocks: int, loss_fn: Callable[..., Any]):
        super().__init__(self._embed, self._block, self._head, num_blocks, parts.init)
        self.parts, self.loss_fn = parts, loss_fn

    def dim_names(self, params: PyTree) -> PyTree:
        """Return for every parameter a tuple of names of its dimensions; the stacked dimension is named "blocks"."""
        made = jax.eval_shape(self.parts.init, jax.random.key(0))
        named = dim_names_of("js.stack", made, *self.parts.names())
        blocks = jax.tree.map(lambda _, names: (BLOCKS, *names), made[_BLOCK], named[_BLOCK])
        return {name: blocks if name == BLOCKS else named[name] for name in params}

    def to_module(self, model: PyTree, key: jax.Array) -> dict[str, Any]:
        """Return {part: its module in its own form, "blocks": a list with the form of each block}."""
        part_key, block_key = jax.random.split(key)
        names = [name for name in model if name != BLOCKS]
        part_keys, block_keys = jax.random.split(part_key, len(model)), jax.random.split(block_key, self.num_blocks)
        made = {name: self.parts.to_module(name, model[name], k) for name, k in zip(names, part_keys)}
        blocks = [jax.tree.map(itemgetter(number), model[BLOCKS]) for number in range(self.num_blocks)]
        return made | {BLOCKS: [self.parts.to_module(_BLOCK, x, k) for x, k in zip(blocks, block_keys)]}

    def from_module(self, module: Any) -> PyTree:
        """Convert {part: module, "blocks": [block, ...]} to the parameters of this model, with stacked blocks."""
        if not isinstance(module, dict) or not module.get(BLOCKS):
            raise TypeError(
                f"js.from_module: the layout's model is of js.stack, so expected a dict of its parts with a list "
                f'"{BLOCKS}", got {type(module).__name__}'
            )
        parts = {name: self.parts.from_module(x) for name, x in module.items() if name != BLOCKS}
        blocks = [self.parts.from_module(x) for x in module[BLOCKS]]
        for number, block in enumerate(blocks):
            check_same_tree(blocks[0], block, f"js.from_module: block {number} differs from block 0", "keep its shapes")
        return parts | {BLOCKS: jax.tree.map(lambda *arrays: jnp.stack(arrays), *blocks)}

    def _bind(self, params: PyTree, key: jax.Array | None) -> BoundModules:
        keys = {name: None if key is None else jax.random.fold_in(key, i) for i, name in enumerate(sorted(params))}
        return BoundModules({name: self.parts.bind(name, params[name], keys[name]) for name in params})

    def _embed(self, params: PyTree, batch: PyTree, key: jax.Array | None) -> BlockArguments:
        # `model.blocks` raises an exception to leave the loss there: only an exception can stop a function midway.
        def reach(*args: Any, **kwargs: Any) -> None:
            raise _BlocksReached(args, kwargs)

        def run(params: PyTree) -> tuple[BlockArguments, Values]:
            bound = self._bind(params, key)
            try:
                call_loss(self.loss_fn, PartsModel(bound.called, reach), batch, train=key is not None)
            except _BlocksReached as reached:
                return BlockArguments.of(reached.args_, reached.kwargs_), bound.values()
            raise ValueError("js.stack: the loss must call model.blocks(x), which it did not")

        embedded: BlockArguments = run_unchanged(run, params)
        return embedded

    def _block(self, params: PyTree, x: BlockArguments, key: jax.Array | None) -> BlockArguments:
        def run(params: PyTree) -> tuple[BlockArguments, Values]:
            bound = BoundModules({_BLOCK: self.parts.bind(_BLOCK, params[_BLOCK], key)})
            args, kwargs = x.arguments()
            y = bound.called[_BLOCK](*args, **kwargs)
            return replace(x, x=y), bound.values()

        after: BlockArguments = run_unchanged(run, {_BLOCK: params})
        return after

    def _head(self, params: PyTree, x: BlockArguments, batch: PyTree, key: jax.Array | None) -> Mean | Loss:
        # The parts have the key `before` until model.blocks is called, and `key` afterwards. Both have the same value,
        # but as two arguments of the trace they show whether the result depends on a draw from before the blocks.
        def run_unchecked(params: PyTree, x: PyTree, batch: PyTree, before: Any, key: Any) -> tuple[Any, Values]:
            halves = [self._bind(params, before), self._bind(params, key)]
            ran: list[bool] = []

            def blocks(*_: Any, **__: Any) -> Any:
                if ran:
                    raise ValueError("js.stack: the loss must call model.blocks(x) once, but called it again")
                ran.append(True)
                model.parts_ = halves[1].called
                return x

            model = PartsModel(halves[0].called, blocks)
            output = call_loss(self.loss_fn, model, batch, train=key is not None)
            return output, [value for half in halves for value in half.values()]

        def run(params: PyTree, *rest: Any) -> Any:
            return run_unchanged(lambda params: run_unchecked(params, *rest), params)

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


class PartsModel:
    """The model that a user's loss receives: `model.blocks` runs all blocks, every other module has its own attribute.

    For example `model.embed` and `model.head`. Attributes of this class itself end in an underscore, so that modules
    may have any other name.
    """

    def __init__(self, parts: dict[str, Any], blocks: Callable[..., Any]):
        self.parts_, self.blocks = parts, blocks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "parts_":
            raise AttributeError(name)
        if name not in self.parts_:
            known = ", ".join(f"model.{part}" for part in (*self.parts_, BLOCKS))
            raise AttributeError(f"js.stack: the model has no part {name!r}, only {known}; pass {name}=... to js.stack")
        return self.parts_[name]


class BoundModules:
    """The modules that one call of the loss uses, with their parameters.

    Args:
      bound: {name: (the callable that the user's loss receives, a function to call after the loss)}. The function
        returns the module's parameters, for the check that the loss has not changed them.

    Attributes:
      called: the callables, by name.
    """

    def __init__(self, bound: dict[str, tuple[Any, Callable[[], Values]]]):
        self.called = {name: called for name, (called, _) in bound.items()}
        self._values = {name: values for name, (_, values) in bound.items()}

    def values(self) -> Values:
        """Return (path, value) of every parameter after the loss, to check that the loss changed none.

        Raises:
          ValueError: a module drew random numbers without a key.
        """
        return [(f"{name}/{path}", x) for name, values in self._values.items() for path, x in values()]


class _BlocksReached(BaseException):
    """Raised by `model.blocks` to end the user's loss at this call, when the input of the first block is known.

    It is a BaseException, so that no `except Exception` in the user's loss catches it.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        if not args:
            raise TypeError("js.stack: model.blocks needs the activations as its first argument: model.blocks(x)")
        self.args_, self.kwargs_ = args, kwargs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockArguments:
    """The arguments of a block: the activations, and further arguments, such as a mask, that all blocks receive alike.

    Attributes:
      x: the activations, which each block replaces.
      arrays: the arrays among the further arguments.
      form: static: (tree structure of the further arguments, their leaves with None in place of each array).
    """

    x: PyTree
    arrays: list[Any]
    form: Any = field(metadata={"static": True})

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockArguments:
        """Make a `BlockArguments` from the arguments of `model.blocks(x, ...)`: separate arrays from static values.

        Raises:
          TypeError: an argument is neither an array nor hashable.
        """
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
        """Return (positional arguments, keyword arguments) with which to call a block."""
        tree, static = self.form
        arrays = iter(self.arrays)
        args, kwargs = tree.unflatten([next(arrays) if leaf is None else leaf for leaf in static])
        return (self.x, *args), kwargs


@dataclass(frozen=True, eq=False)
class _LinenParts:
    """The Linen modules of a `js.stack` model by name: "block", and the modules before and after the blocks."""

    modules: dict[str, nn.Module]
    loss_fn: Callable[..., Any]
    batch: PyTree

    def init(self, key: jax.Array) -> PyTree:
        """Initialise every module; return {name: its parameters}, with the parameters of one block under "block".

        Raises:
          ValueError: a module has state, or the block has no parameters.
        """
        with without_box_placement():
            made = {name: nn.unbox(variables) for name, variables in self._boxed(key).items()}
        states = {name: {kind: x for kind, x in made[name].items() if kind != "params"} for name in made}
        _check_no_state(states)
        if not made[_BLOCK].get("params"):
            raise ValueError("js.stack: the block has no parameters, or the loss did not call model.blocks(x)")
        return {name: variables.get("params", {}) for name, variables in made.items()}

    def bind(self, name: str, params: PyTree, key: jax.Array | None) -> tuple[Any, Callable[[], Values]]:
        """Return (the callable that the user's loss receives for this module, a function to call after the loss).

        For NNX the function returns parameters that the loss may have changed. A Linen module can't change its
        parameters, so here it returns an empty list.
        """
        return LinenModel(self.modules[name], params, key), list

    def to_module(self, name: str, params: PyTree, key: jax.Array) -> dict[str, Any]:
        """Return the variables that the part's `apply` takes."""
        return {"params": params}

    def from_module(self, variables: Any) -> PyTree:
        """Return the parameters in a part's variables, with or without metadata boxes."""
        return nn.unbox(check_variables("the layout's model is of js.stack with Linen modules", variables)["params"])

    def names(self) -> tuple[dict[Path, Names], dict[Path, Names]]:
        """Return (the names of dimensions in parameters' metadata, the dimensions that layers sum over), by path.

        The second is {path of a kernel: "contracted", "spatial" or None for each dimension}.
        """
        contracted: dict[str, dict[Path, Names]] = {}
        made = jax.eval_shape(lambda key: self._boxed(key, contracted), jax.random.key(0))
        boxed = {name: variables.get("params", {}) for name, variables in made.items()}
        return names_in_boxes(boxed), _join_paths(contracted)

    def _boxed(self, key: jax.Array, contracted: dict[str, dict[Path, Names]] | None = None) -> dict[str, Any]:
        """Initialise every module; return {name: its variables, in their metadata boxes}.

        If `contracted` is a dict, add {name: {path of a kernel: "contracted", "spatial" or None for each dimension}}
        to it.
        """
        keys = jax.random.split(key, len(self.modules))
        fresh = {name: LinenInit(self.modules[name], k) for name, k in zip(sorted(self.modules), keys)}
        parts = {name: one for name, one in fresh.items() if name != _BLOCK}
        call_loss(self.loss_fn, PartsModel(parts, fresh[_BLOCK]), zeros_of(self.batch), train=True)
        if contracted is not None:
            contracted.update((name, one.contracted) for name, one in fresh.items())
        return {name: one.variables for name, one in fresh.items()}


@dataclass(frozen=True, eq=False)
class _NnxParts:
    """The NNX modules of a `js.stack` model by name: "block", and the modules before and after the blocks."""

    modules: dict[str, Nnx]

    def init(self, key: jax.Array) -> PyTree:
        """Initialise every module; return {name: its parameters}, with the parameters of one block under "block".

        Raises:
          ValueError: a module has state.
        """
        keys = jax.random.split(key, len(self.modules))
        made = {name: self.modules[name].make_params(k) for name, k in zip(sorted(self.modules), keys)}
        _check_no_state({name: model.state for name, model in made.items() if isinstance(model, Model)})
        return made

    def bind(self, name: str, params: PyTree, key: jax.Array | None) -> tuple[Any, Callable[[], Values]]:
        """Return (the module that the user's loss receives, a function to call after the loss).

        The function returns (path, value) of every parameter, since the loss could have changed it.
        """
        module, after = self.modules[name].bind(params, key)
        return module, lambda: after()[1]

    def to_module(self, name: str, params: PyTree, key: jax.Array) -> flax_nnx.Module:
        """Make the part's module, in evaluation mode, with the given parameters."""
        return self.modules[name].to_module(params, key)

    def from_module(self, module: Any) -> PyTree:
        """Return the parameters of a part's module as nested dicts."""
        return self.modules[_BLOCK].from_module(module)

    def names(self) -> tuple[dict[Path, Names], dict[Path, Names]]:
        """Return (the names of dimensions in parameters' metadata, the dimensions that layers sum over), by path.

        The second is {path of a kernel: "contracted", "spatial" or None for each dimension}.
        """
        parts = self.modules.items()
        return (
            _join_paths({name: one.names for name, one in parts}),
            _join_paths({name: one.contracted for name, one in parts}),
        )


def _join_paths(parts: dict[str, dict[Path, Names]]) -> dict[Path, Names]:
    return {(name, *path): names for name, found in parts.items() for path, names in found.items()}


def _check_no_state(states: dict[str, PyTree]) -> None:
    raise_all(
        (f"{name}: {path}" for name, state in states.items() for path in paths(state)),
        ValueError,
        "js.stack: a model of blocks has no state, so every variable must be a parameter, unlike these (batch "
        "statistics, caches); normalise with LayerNorm or RMSNorm, or use js.linen or js.nnx",
    )
