"""`Layout`: the placement of every array of a training run, for training, checkpoints, planning and pictures."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxshard.core.apply_strategy import place_batch
from jaxshard.core.batch import BatchPlan
from jaxshard.core.carried import Carried
from jaxshard.core.known_model import KnownModel
from jaxshard.core.layout_text import Contents, explain, summarize, to_html
from jaxshard.core.layout_text import human_bytes as human_bytes
from jaxshard.core.layout_text import spec_str as spec_str
from jaxshard.core.loss import Model
from jaxshard.core.low_rank import has_low_rank, is_low_rank
from jaxshard.core.mesh import MeshById
from jaxshard.core.placed import Placed, bytes_by_role, bytes_on_host, split_share
from jaxshard.core.placement import Placement, axes_of
from jaxshard.core.stored import store, unstore
from jaxshard.core.strategy import Strategy
from jaxshard.core.strategy_parts import Context, Expert, Pipeline, part_of
from jaxshard.core.tree import BLOCKS, Leaf, abstract, bytes_of, leaf_of
from jaxshard.core.types import PyTree, Role


@dataclass(frozen=True)
class Layout:
    """The placement of every array of a training run, by role; made by `js.layout`. It holds shapes, never values.

    Attributes:
      mesh: the mesh.
      strategy: the strategy that was applied.
      params: the `Placement` of each parameter, stored and in use, as a tree.
      grads: the placement of each gradient; None for frozen parameters.
      opt_params: the placement in which the optimizer's update receives each parameter and its gradient; None for
        frozen parameters.
      opt_state: the placement of each array of the optimizer state.
      state: the placement of each array of the model's own state.
      shapes: the logical shapes of parameters, optimizer state and model state.
      trainable: True for every parameter that is trained, False for a frozen one.
      stacked_for_user: True if the user wrote single blocks that the library stacked: `js.make_step` then refuses an
        optimizer that would update stacked blocks differently from single ones.
      model: the model of the library (such as `js.Stacked`) whose `init` the layout was made from; None for another
        function, and after unpickling.
      carried: makes and stores an optimizer state that is not stored array by array (with owners of matrices, or with
        the replicas of `js.local`); None for all other states.

    Example:
        layout = js.layout(js.zero2(), js.make_mesh(data=8), init_fn, tx)
        print(layout)                              # a summary of 20 lines
        print(layout.explain())                    # a table of all arrays
        layout.bytes_per_device()["opt"]           # bytes of optimizer state on each device
        layout.params["head"]["kernel"].store      # PartitionSpec(None, None): replicated
    """

    mesh: Mesh
    strategy: Strategy
    params: PyTree
    grads: PyTree
    opt_params: PyTree
    opt_state: PyTree
    state: PyTree
    shapes: Shapes
    trainable: PyTree
    stacked_for_user: bool = False
    model: KnownModel | None = field(default=None, compare=False, repr=False)
    carried: Carried | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without the model, and with device ids in place of the mesh's devices.

        Neither functions nor devices can be pickled.
        """
        own = {one.name: self.__dict__[one.name] for one in fields(self)}
        # A model holds functions, which can't be pickled.
        return own | {"model": None, "mesh": MeshById.of(self.mesh) if isinstance(self.mesh, Mesh) else self.mesh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        mesh = state["mesh"]
        self.__dict__.update(state | {"mesh": mesh.find() if isinstance(mesh, MeshById) else mesh})

    @property
    def owners(self) -> Any:
        """The owner of each matrix: the device that updates it. `print(layout.owners)` shows them.

        None unless the optimizer multiplies matrices, as Muon does, and its state is split over devices.
        """
        return getattr(self.carried, "owners", None)

    @property
    def without_owners(self) -> Layout:
        """The same layout without owners of matrices: all optimizer state is split as the strategy says."""
        return self if self.carried is None else self.carried.saved(self)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The `js.pipeline` that places the blocks; None without one."""
        return part_of(self.strategy, Pipeline)

    @cached_property
    def context(self) -> Context | None:
        """The `js.context` that splits the positions of a batch; None without one."""
        return part_of(self.strategy, Context)

    @cached_property
    def expert(self) -> Expert | None:
        """The `js.expert` that gives every device some of the experts; None without one."""
        return part_of(self.strategy, Expert)

    def start_optimizer(self, tx: Any, params: PyTree) -> PyTree:
        """Make the optimizer state for the first step from the trained parameters.

        It consists of logical arrays: they have the shapes that `tx.init` gives them.
        """
        return tx.init(params) if self.carried is None else self.carried.start(tx, params, self.mesh)

    def store_optimizer(self, state: PyTree) -> PyTree:
        """Convert an optimizer state from logical arrays (the shapes of `tx.init`) to the arrays that a run stores."""
        return (store if self.carried is None else self.carried.store)(self.opt_state, state)

    def unstore_optimizer(self, state: PyTree) -> PyTree:
        """Convert an optimizer state from stored arrays to logical arrays (the shapes of `tx.init`)."""
        return (unstore if self.carried is None else self.carried.unstore)(self.opt_state, state)

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of a batch, major first."""
        return split_rows(self.strategy, self.mesh)

    @cached_property
    def sum_axes(self) -> tuple[str, ...]:
        """The mesh axes over which losses, metrics and gradients are summed: the batch axes and the context axes."""
        return (*self.batch_axes, *(self.context.axis if self.context else ()))

    @cached_property
    def manual_axes(self) -> frozenset[str]:
        """The mesh axes that engines make manual in `shard_map`.

        These are the axes that split rows, the axes of `js.context`, and the axes that split parameters or gradients in
        storage (`store`) but not in computation (`use`). Axes of `js.tensor` are left to the compiler, so the set is
        empty if no other axis splits anything.
        """
        axes = set(self.sum_axes)
        for placement in (*jax.tree.leaves(self.params), *jax.tree.leaves(self.grads)):
            axes |= set(axes_of(placement.store)) - set(axes_of(placement.use))
        return frozenset(axes)

    @property
    def factors(self) -> PyTree:
        """A tree like the parameters, with True for the low-rank factors of a model of `js.lora`."""

        def mask(x: Any) -> Any:
            return replace(x, base=False, a=True, b=True, scale=False) if is_low_rank(x) else False

        return jax.tree.map(mask, self.shapes.params, is_leaf=is_low_rank)

    @property
    def base(self) -> PyTree:
        """A tree like the parameters, with True for the frozen base of a `js.lora` model; checkpoints leave it out."""
        adapted = has_low_rank(self.shapes.params)
        return jax.tree.map(lambda trained: adapted and not trained, self.trainable)

    def batch_placement(self, array: Any) -> Placement:
        """Return the placement of one array of a global batch; raise ValueError if devices do not divide its rows."""
        return place_batch(self.strategy, leaf_of((), array), self.mesh)

    def batch_sharding(self, array: Any) -> NamedSharding:
        """Return the sharding of a global batch array (or its ShapeDtypeStruct): rows over the batch axes."""
        return self.batch_placement(array).sharding(self.mesh)

    def plan_batch(self, batch: PyTree) -> BatchPlan:
        """Return the plan of a batch: which arrays have rows, and the placement of every array.

        Batches of the same shapes get the same plan, which is made once.
        """
        shapes = abstract(batch)
        leaves, tree = jax.tree.flatten(shapes)
        return self._batch_plans.setdefault(
            (tree, *leaves), BatchPlan(self.strategy, self.mesh, self.batch_axes, shapes)
        )

    @cached_property
    def _batch_plans(self) -> dict[Any, BatchPlan]:
        return {}

    def batch_placements(self, batch: PyTree) -> PyTree:
        """Return a tree like a global batch, with the placement of every array; arrays without rows are replicated."""
        return self.plan_batch(batch).placements

    def batch_shardings(self, batch: PyTree) -> PyTree:
        """Return a tree like a global batch, with the `NamedSharding` of every array."""
        return self.plan_batch(batch).shardings

    def rows_mask(self, batch: PyTree) -> PyTree:
        """Return a tree like a batch, with True for every array that has rows.

        The batch may be the global batch or the part of one device.
        """
        return self.plan_batch(batch).rows

    def shardings(self, placements: PyTree) -> PyTree:
        """Convert a tree of placements to a tree of `NamedSharding`."""
        return jax.tree.map(lambda placement: placement.sharding(self.mesh), placements)

    def placed(self) -> list[Placed]:
        """List every array with its role and placement: parameters, gradients, optimizer state, model state."""
        trees: list[tuple[Role, PyTree, PyTree]] = [
            ("param", self.shapes.params, self.params),
            ("grad", select(self.trainable, self.shapes.params), self.grads),
            ("opt", self.shapes.opt_state, self.opt_state),
            ("state", self.shapes.state, self.state),
        ]
        return [
            Placed(role, leaf_of(path, array), placement)
            for role, arrays, placements in trees
            for (path, array), placement in zip(
                jax.tree_util.tree_leaves_with_path(arrays), jax.tree.leaves(placements), strict=True
            )
        ]

    def bytes_per_device(self) -> dict[Role, int]:
        """Return the bytes of the stored arrays on one device by role.

        The roles are "param", "grad", "opt" and "state".
        """
        return bytes_by_role(self.placed(), self.mesh)

    def host_bytes_per_device(self) -> int:
        """Return the bytes per device of arrays that `js.offload` keeps in the host's memory."""
        return bytes_on_host(self.placed(), self.mesh)

    def argument_bytes(self, batch: PyTree) -> int:
        """Return the bytes per device of all arguments of a step.

        These are the parameters, the optimizer state, the model state, the step's index, the key and the batch.
        """
        resting = sum(count for role, count in self.bytes_per_device().items() if role != "grad")
        placed = zip(jax.tree.leaves(batch), jax.tree.leaves(self.batch_placements(batch)), strict=True)
        rows: int = sum(placement.bytes_per_device(self.mesh, x.dtype) for x, placement in placed)
        return resting + rows + bytes_of((), jnp.int32) + bytes_of((), self.shapes.key.dtype)

    def sharded_fraction(self, role: Role) -> float:
        """Return the fraction, from 0 to 1, of a role's elements that are in sharded arrays.

        Roles are "param", "grad", "opt" and "state". An array is sharded if it is split over more than one device.
        """
        return split_share(self.placed(), self.mesh, role)

    def explain(self) -> str:
        """Return a table: for each array role, path, shape, dtype, spec, bytes, and why it is replicated or padded."""
        return explain(self._contents())

    def __str__(self) -> str:
        """Return a summary by role and kind of array, with what is replicated and why.

        It has at most 20 lines of 100 columns.
        """
        return summarize(self._contents())

    def _contents(self) -> Contents:
        stacked = jax.tree.leaves(self.shapes.params[BLOCKS])[0].shape[0] if self.pipeline else 0
        extra = [] if self.carried is None else self.carried.describe(self.mesh)
        return Contents(self.mesh, self.batch_axes, self.context, self.pipeline, stacked, self.placed(), extra)

    def _repr_html_(self) -> str:
        """Return the summary as HTML for notebooks, followed by a folded table of all arrays."""
        return to_html(self._contents())


def check_layout(call: str, layout: Any) -> None:
    """Raise TypeError unless `layout` is a `Layout`, for example because the user mixed up the order of arguments.

    Args:
      call: how the function is called: "js.restore(dir, layout)".
      layout: the user's argument.
    """
    if isinstance(layout, Layout):
        return
    how = "; make it by js.layout(strategy, mesh, init_fn, tx)" if callable(layout) else ""
    raise TypeError(f"layout must be a js.Layout, got {type(layout).__name__}; write {call}, in this order{how}")


class Shapes(NamedTuple):
    """The logical shapes of a layout's arrays: trees of ShapeDtypeStruct.

    Attributes:
      params: the parameters.
      opt_state: the optimizer state that `tx.init` returns for the trained parameters.
      state: the model's own state; () without one.
      key: a random key.
    """

    params: PyTree
    opt_state: PyTree
    state: PyTree
    key: Any


def split_model(model: PyTree) -> tuple[PyTree, PyTree]:
    """Split the result of an `init_fn` into (params, state). The state is () if `init_fn` returned parameters alone."""
    return (model.params, model.state) if isinstance(model, Model) else (model, ())


def join_model(params: PyTree, state: PyTree) -> PyTree:
    """Make the model that users' functions receive: `js.Model(params, state)`, or `params` if the state is ()."""
    return params if isinstance(state, tuple) and state == () else Model(params, state)


def select(mask: PyTree, tree: PyTree) -> PyTree:
    """Replace the leaves of a tree by None where the tree `mask` is False."""
    return jax.tree.map(lambda keep, x: x if keep else None, mask, tree)


def put_back(mask: PyTree, chosen: PyTree, rest: PyTree) -> PyTree:
    """Merge two trees: take the leaf of `chosen` where `mask` is True, and of `rest` elsewhere.

    This is the inverse of `select`: `put_back(mask, select(mask, tree), tree)` is `tree`.
    """
    return jax.tree.map(lambda keep, a, b: a if keep else b, mask, chosen, rest, is_leaf=lambda x: x is None)


def split_rows(strategy: Strategy, mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes over which a strategy splits the rows of a batch, major first."""
    probe = Leaf("a batch", (mesh.size,), jnp.float32, (None,))
    return axes_of(place_batch(strategy, probe, mesh).store)
