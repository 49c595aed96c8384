"""Everything undocumented that this package uses of Flax (0.12), with what depends on it.

tests/adapt/test_compat.py has a test for each entry. A new version of Flax that changes one of these breaks

- `initialize_through` loudly if `flax.core.apply` or a module's `clone(parent=scope)` goes, and silently if the flag
  "initializing" gets another name: modules would believe that they are applied, and `init` would count as a step (an
  updated average of BatchNorm, an advanced cache).
- `names_in_boxes` silently: if Flax's boxes are no `nn.Partitioned` any more, parameters have no names, and a strategy
  by names (`js.tensor`) leaves them whole.
- `names_of_variable` silently, in the same way: the key of the metadata has been renamed once (Flax 0.12).
- `without_box_placement` loudly: if a box places its array in another method than `unbox`, modules whose initializers
  unbox what they made (DenseGeneral under `nn.with_partitioning`) raise under `js.explicit`.
- `without_eager_placement` loudly: the names of dimensions would be looked up among the axes of a mesh.
- `intercept_calls` loudly: either the class of an instance can't be changed any more, or the changed call does not
  run, and then a unit "never ran".

The rest of what this package uses of Flax is in Flax's API reference.
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

if TYPE_CHECKING:  # imported where it is used: it brings IPython, which models of Linen do not need
    from flax import nnx

Names = tuple[Any, ...]
"""The metadata of an array: a name, or None, for each of its dimensions."""

Path = tuple[Any, ...]


def initialize_through(
    module: nn.Module, call: Callable[[nn.Module], Any], variables: PyTree, key: jax.Array, leave_out: Iterable[str]
) -> tuple[Any, dict[str, Any]]:
    """Run `call(module)` as `module.init` does, on the variables that an earlier call made.

    `Module.init` starts from no variables, so it can run one method once; a loss may call several.

    Args:
      module: an unbound Linen module.
      call: what to run on it; receives the module, bound.
      variables: what earlier calls made, {} at first.
      key: the random key of all streams.
      leave_out: collections that are not kept.

    Returns:
      What `call` returned, and all variables, those with metadata in their boxes.
    """
    # "initializing" is what Module.is_initializing() reads. Flax calls the flags internal.
    flags = {"initializing": True}
    run = flax.core.apply(
        lambda scope: call(module.clone(parent=scope)), mutable=flax.core.DenyList([*leave_out]), flags=flags
    )
    output, made = run(variables, rngs={"params": key})
    return output, dict(made)


def names_in_boxes(boxed: PyTree) -> dict[Path, Names]:
    """Return the names in the metadata boxes of a tree of Linen variables, by path."""
    # nn.with_logical_partitioning makes LogicallyPartitioned, a subclass.
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    boxes = ((path, box) for path, box in leaves if isinstance(box, nn.Partitioned))
    return {tuple(part.key for part in path): tuple(box.names) for path, box in boxes}


@contextmanager
def without_box_placement() -> Iterator[None]:
    """Unbox Linen variables without placing them by the names in their boxes.

    Where a mesh is in use, as inside of `shard_map`, `unbox` takes the names for axes of that mesh. DenseGeneral
    unboxes in its initializer, which Flax runs in every call to compare shapes: three names on a matrix, which raises.
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
    """Return the names in the sharding metadata of an NNX variable; () if it has none."""
    metadata = variable.get_metadata()
    # Flax 0.12 calls it "out_sharding", before it was "sharding" and, in nnx.Param(..., sharding_names=), that.
    for key in ("out_sharding", "sharding", "sharding_names"):
        names = metadata.get(key)
        if names is not None:
            return tuple(getattr(names, "spec", names))
    return ()


def without_eager_placement() -> AbstractContextManager[Any]:
    """Return a context in which NNX places no variable by its metadata as soon as it is made."""
    from flax import nnx

    context: AbstractContextManager[Any] = nnx.use_eager_sharding(False)
    return context


Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""`around(instance, call, args, kwargs)`: runs instead of `instance(*args, **kwargs)`, which is `call(...)`."""

_AROUND = "_jaxshard_around"


def intercept_calls(
    module: nnx.Module, classes: tuple[type, ...], around: Callable[[Path, nnx.Module], Around]
) -> None:
    """Put `around(path, instance)` around the calls of all instances of `classes` in a module, in place.

    NNX has no `intercept_methods` as Linen has. Python looks `__call__` up in the class, never in the instance, so each
    instance gets a subclass of its class. It goes around the checks of `nnx.Module.__setattr__`, which would take
    `around` for a part of the model.

    Args:
      module: is changed; pass a copy that the caller owns.
      classes: subclasses of `nnx.Module`.
      around: what it returns must be hashable, for it becomes a static attribute in the graph of the module.
    """
    from flax import nnx

    found: list[tuple[Path, Any]] = [(path, node) for path, node in nnx.iter_graph(module) if isinstance(node, classes)]
    for path, node in found:
        cls: Any = type(node)
        object.__setattr__(node, "__class__", _intercepted(cls))
        object.__setattr__(node, _AROUND, around(path, node))


@functools.cache  # NNX registers every class of modules for good, so there is one subclass for each class.
def _intercepted(cls: Any) -> Any:
    """Return the subclass whose call runs through `around`."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _AROUND)(self, functools.partial(cls.__call__, self), args, kwargs)

    return type(cls)(cls.__name__, (cls,), {"__call__": call})
