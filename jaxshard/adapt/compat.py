"""Wrap every undocumented part of Flax (0.12) that this package uses.

tests/adapt/test_compat.py has a test for each entry. If a new version of Flax changes what an entry uses, the entry
breaks as follows, loudly (with an error) or silently:

- `initialize_through` loudly if `flax.core.apply` or a module's `clone(parent=scope)` is removed, and silently if the
  flag "initializing" is renamed: modules would behave as in `apply`, and `init` would count as a step (BatchNorm would
  update its average, and a cache would advance).
- `names_in_boxes` silently: if Flax's boxes are no longer `nn.Partitioned`, parameters have no names, and a strategy
  by names (`js.tensor`) leaves them replicated.
- `names_of_variable` silently: if the key of the metadata is renamed, as in Flax 0.12, parameters have no names.
- `without_box_placement` loudly: if a box places its array in another method than `unbox`, modules that unbox in their
  initializers (DenseGeneral under `nn.with_partitioning`) raise under `js.explicit`.
- `without_eager_placement` loudly: Flax would look for the names of dimensions among the axes of the mesh.
- `intercept_calls` loudly: either the class of an instance can no longer be changed, or the changed call does not run,
  and the error says that a unit "never ran".

Everything else that this package uses of Flax is in Flax's API reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import flax.core
import jax
from flax import linen as nn

from jaxshard.core.types import PyTree

if TYPE_CHECKING:  # imported lazily: nnx imports IPython, which Linen models do not need
    from flax import nnx

Names = tuple[Any, ...]
"""The names in the metadata of an array: a name, or None, for each of its dimensions."""

Path = tuple[Any, ...]
"""The keys from the root of a tree, or of a module, to a leaf or submodule."""


def initialize_through(
    module: nn.Module, call: Callable[[nn.Module], Any], variables: PyTree, key: jax.Array, leave_out: Iterable[str]
) -> tuple[Any, dict[str, Any]]:
    """Initialise a module as `module.init` does, but keep the variables that earlier calls have made.

    `Module.init` starts without variables, so it can initialise through only one call of the module; a loss may make
    several calls.

    Args:
      module: an unbound Linen module.
      call: the function to run; it receives the bound module.
      variables: the variables that earlier calls made, {} at first.
      key: the random key of all streams.
      leave_out: collections to drop from the result.

    Returns:
      (the output of `call`; all variables, including the earlier variables, in their metadata boxes if they have any).
    """
    # Module.is_initializing() reads the flag "initializing". Flax calls the flags internal.
    flags = {"initializing": True}
    run = flax.core.apply(
        lambda scope: call(module.clone(parent=scope)), mutable=flax.core.DenyList([*leave_out]), flags=flags
    )
    output, made = run(variables, rngs={"params": key})
    return output, dict(made)


def names_in_boxes(boxed: PyTree) -> dict[Path, Names]:
    """Return {path of a variable: names of its dimensions} from the metadata boxes of a tree of Linen variables."""
    # nn.with_logical_partitioning makes LogicallyPartitioned, a subclass.
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    boxes = ((path, box) for path, box in leaves if isinstance(box, nn.Partitioned))
    return {tuple(part.key for part in path): tuple(box.names) for path, box in boxes}


@contextmanager
def without_box_placement() -> Iterator[None]:
    """Enter a context in which unboxing a Linen variable adds no sharding constraint.

    If a mesh is in use, as inside of `shard_map`, Flax's `unbox` would mistake the names in the box for axes of this
    mesh. DenseGeneral unboxes in its initializer, which Flax runs in every call to compare shapes. There the array is a
    matrix, but has three names, so that the constraint would raise.
    """
    kinds: tuple[Any, ...] = (nn.Partitioned, nn.LogicallyPartitioned)
    before = [kind.unbox for kind in kinds]
    try:
        for kind in kinds:
            kind.unbox = lambda self, apply_constraint=False: self.value
        yield
    finally:
        for kind, unbox in zip(kinds, before, strict=True):
            kind.unbox = unbox


def names_of_variable(variable: Any) -> Names:
    """Return the names of dimensions in the sharding metadata of an NNX variable; () if it has no such metadata."""
    metadata = variable.get_metadata()
    # Flax 0.12 has "out_sharding"; before, it was "sharding" and, by nnx.Param(..., sharding_names=), "sharding_names".
    for key in ("out_sharding", "sharding", "sharding_names"):
        names = metadata.get(key)
        if names is not None:
            return tuple(getattr(names, "spec", names))
    return ()


def without_eager_placement() -> AbstractContextManager[Any]:
    """Return a context in which NNX does not shard new variables by their metadata."""
    from flax import nnx

    context: AbstractContextManager[Any] = nnx.use_eager_sharding(False)
    return context


Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`around(instance, call, args, kwargs)` replaces `instance(*args, **kwargs)`; `call(*args, **kwargs)` is the original.
"""

_AROUND = "_jaxshard_around"


def intercept_calls(
    module: nnx.Module, classes: tuple[type, ...], around: Callable[[Path, nnx.Module], Around]
) -> None:
    """Change a module in place so that each call of an instance of `classes` in it runs through a wrapper.

    NNX has nothing like Linen's `intercept_methods`. Python looks `__call__` up in the class, never in the instance, so
    each instance gets a subclass of its class. `object.__setattr__` bypasses the checks of `nnx.Module.__setattr__`,
    which would mistake the wrapper for a part of the model.

    Args:
      module: the module, which is changed; pass a copy.
      classes: subclasses of `nnx.Module`.
      around: `around(path, instance)` returns the wrapper of an instance, an `Around`. The wrapper must be hashable,
        since it becomes a static attribute in the graph of the module.
    """
    from flax import nnx

    found: list[tuple[Path, Any]] = [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, classes)]
    for path, node in found:
        cls: Any = type(node)
        object.__setattr__(node, "__class__", _intercepted(cls))
        object.__setattr__(node, _AROUND, around(path, node))


@functools.cache  # NNX never unregisters a class of modules, so make only one subclass per class.
def _intercepted(cls: Any) -> Any:
    """Make a subclass of `cls` whose `__call__` runs through the wrapper that `intercept_calls` set on the instance."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _AROUND)(self, functools.partial(cls.__call__, self), args, kwargs)

    return type(cls)(cls.__name__, (cls,), {"__call__": call})
