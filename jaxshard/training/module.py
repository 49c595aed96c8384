"""Give a trained model back in the form in which its library holds it (`to_module`), and take it again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.core.keys import keys_of, words_of
from jaxshard.core.known_model import InitOf, KnownModel, unwrap
from jaxshard.core.layout import Layout, check_layout, join_model
from jaxshard.core.low_rank import matrix_shapes
from jaxshard.core.placement import Placement
from jaxshard.core.settings import no_mesh, with_own_settings
from jaxshard.core.stored import unstore
from jaxshard.core.tree import check_same_tree
from jaxshard.core.types import PyTree
from jaxshard.training.base import merge_stored
from jaxshard.training.state import TrainState, check_run


@with_own_settings
def to_module(run: TrainState, layout: Layout, model: Any = None) -> Any:
    """Return a trained model in its own form, as it is without jaxshard: an `nnx.Module`, or variables of Linen.

    | model | result |
    |---|---|
    | `js.nnx` | an `nnx.Module` in evaluation mode; `module.train()` switches to training |
    | `js.linen`, `js.scanned` | the variables {"params": ..., "batch_stats": ...} that `module.apply` takes |
    | `js.stack` | {part: its `nnx.Module` or its variables, "blocks": a list with those of each block} |
    | `js.Stacked`, `js.models`, a function | what `init_fn` returns, with blocks stacked [num_blocks, ...] |
    | `js.lora` | as above, of the model without factors: they are merged into their matrices |

    Arrays have their logical shapes, in model order and without padding, and are copies. Each process gets all of them
    on its default device. If they do not fit there, call this under `jax.default_device(jax.devices("cpu")[0])`. Random
    streams of an `nnx.Module` start from the run's key folded with its step.

    Memory: all parameters and state on the default device. One array at a time is replicated on every device of the
    mesh, and copied through the host. Collectives: an all-gather of each sharded array, so all processes call this.

    Args:
      run: the run; it is not donated.
      layout: the layout of the run.
      model: the model, if the layout does not know it (an unpickled layout): what `js.nnx`, `js.linen`, `js.stack`,
        `js.scanned` or `js.lora` returned, or its `init`.

    Returns:
      The model.

    Raises:
      TypeError: `run` is no `TrainState`, or `model` is none of these models.
      ValueError: the run was donated, or run or model do not fit the layout; the message names every leaf that differs.

    Example:
        model = js.nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs), loss)
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
        run = js.init(model.init, tx, layout, 0)
        module = js.to_module(run, layout)
        logits = module(np.ones((2, 4)))                                       # plain Flax, on one device
        again = js.init(model.init, tx, layout, 0, init_from=js.from_module(module, layout))
    """
    check_layout("js.to_module(run, layout)", layout)
    check_run(layout, run)
    known = _known_model("js.to_module", model, layout)
    params, placed = merge_stored(run.params, layout)
    tree = join_model(_to_local(params, placed.params, layout.mesh), _to_local(run.state, layout.state, layout.mesh))
    if known is None:
        return tree
    key = _local(run.key)
    with no_mesh():
        return known.to_module(tree, jax.random.fold_in(key, int(run.step)))


def from_module(module: Any, layout: Layout, model: Any = None) -> PyTree:
    """Convert a model in its own form, as `js.to_module` returns it, to what `init_fn` returns.

    The result goes into `init_from=` of `js.init`, where training starts from it with a fresh optimizer state, and into
    `js.replace_params`. They check the shapes of all arrays. The arrays are those of `module`, not copies.

    Args:
      module: an `nnx.Module` for a layout of `js.nnx`, variables for `js.linen` and `js.scanned`, and so on, as in the
        table of `js.to_module`. Of a layout of `js.lora`, the model without factors.
      layout: the layout, made from the `init` of the model.
      model: the model, if the layout does not know it, as for `js.to_module`.

    Returns:
      Parameters, or `js.Model(params, state)`. Random streams of an `nnx.Module` are left out.

    Raises:
      TypeError: `module` does not have the form of the layout's model.
      ValueError: the layout was not made from `model`.

    Example:
        model = js.linen(nn.Dense(3), loss, batch)
        layout = js.layout(js.fsdp(), mesh, model.init, tx)
        variables = nn.Dense(3).init(key, batch["x"])                          # or trained elsewhere
        run = js.init(model.init, tx, layout, 0, init_from=js.from_module(variables, layout))
    """
    check_layout("js.from_module(module, layout)", layout)
    known = _known_model("js.from_module", model, layout)
    return module if known is None else known.from_module(module)


def _known_model(who: str, model: Any, layout: Layout) -> KnownModel | None:
    """Return the known model that the user passed, or whose `init` it is; without one, the layout's model, or None.

    Raise unless the model has the shapes of the layout. `who` is the public function that messages name.
    """
    if model is None:
        return layout.model
    init = unwrap(getattr(model, "init", model))
    if not isinstance(init, InitOf):
        raise TypeError(
            f"{who}: model must be what js.nnx, js.linen, js.stack, js.scanned or js.lora returned, or its init, "
            f"got {type(model).__name__}; leave it out for a layout that was made from such an init, or from a function"
        )
    layout_shapes = join_model(layout.shapes.params, layout.shapes.state)
    check_same_tree(
        matrix_shapes(layout_shapes),
        matrix_shapes(jax.eval_shape(init, layout.shapes.key)),
        f"{who}: the layout was not made from this model",
        "pass the model of the layout",
    )
    return init.model


def _to_local(tree: PyTree, placements: PyTree, mesh: Mesh) -> PyTree:
    """Copy stored arrays, in their logical shapes, to the default device of this process, one array at a time."""
    return jax.tree.map(lambda x, placement: _local(_gather_by(placement, mesh)(x)), tree, placements)


@lru_cache(maxsize=512)
def _gather_by(placement: Placement, mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Return a compiled function that makes a stored array logical, and replicates it on the mesh."""
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda x: unstore(placement, x), out_shardings=replicated)


def _local(x: jax.Array) -> jax.Array:
    """Copy a replicated array to the default device."""
    words = np.array(words_of(x))  # a copy, since the memory of `x` may be donated later
    with no_mesh():
        return keys_of(jnp.asarray(words), x.dtype)
