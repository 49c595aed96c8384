"""`js.layout`: choose the sharding of every array of a training run, and how its optimizer's state is kept.

The optimizer's state may be kept by owners of matrices (`owners/`) or by independent replicas (`local.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxshard.core import make_layout
from jaxshard.core.layout import Layout
from jaxshard.core.strategy import Strategy
from jaxshard.core.types import InitFn, PyTree
from jaxshard.optim.local import local_of, with_replicas
from jaxshard.optim.owners.own import own


def layout(
    strategy: Strategy,
    mesh: Mesh,
    init_fn: InitFn,
    tx: Any = None,
    *,
    trainable: PyTree | Callable[[str], bool] | None = None,
) -> Layout:
    """Apply a strategy to a training run: make a `Layout`, which says how every array of the run is sharded.

    Traces `init_fn`, `tx.init` and `tx.update` on shapes alone and touches no device. On CPU devices of
    several processes JAX's persistent compilation cache is turned off, with a warning, because programs loaded from the
    cache can hang there.

    If the optimizer multiplies matrices (Muon, Shampoo) and its state is sharded, every matrix gets an owner, the only
    device that updates it; `print(layout.owners)` lists them. With `layout.without_owners` instead the state of every
    matrix stays sharded, and the compiler inserts the all-gathers that the optimizer needs.

    Args:
      strategy: such as `js.fsdp()`, or several in `js.compose(...)`.
      mesh: made by `js.make_mesh`.
      init_fn: `init_fn(key) -> params`, or `js.Model(params, state)` for a model with variables besides parameters.
      tx: the optax transform that trains the model. Leave it out for a model that is not trained (`js.generate`,
        `js.make_eval_step`): `js.restore` then skips the optimizer's state.
      trainable: which parameters are trained: a function from a path ("blocks/attention/kernel") to True or False, or a
        tree of booleans like the parameters. A frozen parameter has no gradient and no optimizer state. None trains all
        parameters, but only the factors of a `js.lora` model.

    Returns:
      The layout. `print(layout)` is a summary of 20 lines, `print(layout.explain())` shows every array.

    Raises:
      TypeError: `tx` is not an optax GradientTransformation, `strategy` or `init_fn` not a function, `mesh` not a mesh,
        a trainable parameter not floating.
      ValueError: no parameters, none trainable, an axis that the mesh lacks or that is not Auto, two strategies that
        split the same dimension, or an impossible placement; every array is named.

    Example:
        mesh = js.make_mesh(data=4, tensor=2)
        layout = js.layout(js.compose(js.zero2(), js.tensor()), mesh, init_fn, optax.adamw(3e-4))
    """
    made = make_layout.layout(strategy, mesh, init_fn, tx, trainable=trainable)
    if (local := local_of(strategy)) is not None:
        made = with_replicas(made, local)
    elif tx is not None:
        made = own(made, tx)
    make_layout.warn_of_idle_axes(made)
    return made
