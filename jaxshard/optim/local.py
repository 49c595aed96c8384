"""`js.local`: replicas that train independently and are synchronised every few steps (Local SGD, DiLoCo).

The parameters of the `TrainState` are shared by all replicas; these are evaluated, saved and exported. Each replica
trains its own parameters, which differ from the shared ones since the last synchronisation; they are a part of the
optimizer's state:

    params                      [...]             the shared parameters, stored as in any layout
    opt_state.params            [replicas, ...]   each replica's own parameters
    opt_state.inner             [replicas, ...]   each replica's state of the inner optimizer
    opt_state.outer             [...]             the state of the outer optimizer
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from jaxshard.core.layout import Layout, select
from jaxshard.core.make_layout import place_optimizer
from jaxshard.core.mesh import axis_names, axis_size, check_axis
from jaxshard.core.placement import Placement, View, axes_of, spec_entry
from jaxshard.core.stored import store, unstore
from jaxshard.core.strategy_parts import Batch, Composed, Strategy, parts_of
from jaxshard.core.transform import check_transform
from jaxshard.core.tree import Leaf, paths, raise_all
from jaxshard.core.types import AxisName, PyTree, Role


class LocalState(NamedTuple):
    """The optimizer state under `js.local`, where replicas train independently and are averaged every few steps.

    Attributes:
      params: each replica's own parameters, [replicas, ...].
      inner: each replica's state of the layout's optimizer `tx`, [replicas, ...].
      outer: the state of the outer optimizer, which updates the shared parameters when replicas are averaged. It is in
        a tuple of one element, so checkpoints name its arrays outer/0/...
    """

    params: Any
    inner: Any
    outer: tuple[Any]


@dataclass(frozen=True)
class Local:
    """The strategy that `js.local` returns: replicas that train independently and are averaged every few steps.

    It also makes, stores and saves the optimizer state of the replicas (`core.carried.Carried`).

    Attributes:
      axis: the mesh axes over which the replicas are spread.
      every: the number of steps from one synchronisation to the next.
      outer: the optax transform that updates the shared parameters at a synchronisation.
      warmup: the number of first steps in which gradients are averaged over replicas.
    """

    rank: ClassVar[int] = 0

    axis: tuple[str, ...]
    every: int
    outer: optax.GradientTransformation
    warmup: int = 0

    def __call__(self, role: Role, leaf: Leaf, placement: Placement, mesh: Mesh) -> Placement:
        check_axis(mesh, self.axis, "local")
        return Batch(self.axis)(role, leaf, placement, mesh)

    def __repr__(self) -> str:
        return f"Local(axis={self.axis}, every={self.every}, warmup={self.warmup})"

    def replicas(self, mesh: Mesh) -> int:
        """Return the number of replicas."""
        return axis_size(mesh, self.axis)

    def due(self, step: jax.Array) -> jax.Array:
        """Return what follows step number `step` (the first is 0), as an integer.

        0: nothing. 1: average the replicas and update the shared parameters. 2: after a warm-up step, copy the
        parameters of one replica to the shared parameters; all replicas then have equal parameters.
        """
        return jnp.where(step < self.warmup, 2, ((step + 1) % self.every == 0).astype(jnp.int32))

    def start(self, tx: Any, params: PyTree, mesh: Mesh) -> LocalState:
        """Make the initial optimizer state; all replicas start with the same parameters."""

        def copy(x: Any) -> Any:
            x = jnp.asarray(x)
            return jnp.broadcast_to(x[None], (self.replicas(mesh), *x.shape))

        own, inner = jax.tree.map(copy, params), jax.tree.map(copy, tx.init(params))
        return LocalState(own, inner, (self.outer.init(params),))

    def store(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert optimizer state from logical arrays to stored arrays (padded, reshaped), as its placements say."""
        return store(placements, state)

    def unstore(self, placements: PyTree, state: PyTree) -> PyTree:
        """Convert optimizer state from stored arrays to logical arrays: the inverse of `store`."""
        return unstore(placements, state)

    def saved(self, layout: Layout) -> Layout:
        """Return the layout in which checkpoints store the state: `layout` itself, with the state of every replica."""
        return layout

    def describe(self, mesh: Mesh) -> list[str]:
        """Return one line of text about the replicas, for `print(layout)`."""
        alike = f"; alike in the first {self.warmup}" if self.warmup else ""
        often = f"synchronised every {self.every} steps{alike}"
        return [f"{self.replicas(mesh)} replicas over {' x '.join(self.axis)}: {often}"]

    def lift(self, placement: Placement, mesh: Mesh) -> Placement:
        """Return the placement of an array [replicas, ...], given the placement of one replica's array [...]."""
        count, axis, view = self.replicas(mesh), spec_entry(self.axis), placement.view
        lifted = View((count, *view.logical), (count, *view.padded), (count, *view.stored), view.extra_dims)
        use, store = (PartitionSpec(axis, *spec) for spec in (placement.use, placement.store))
        return replace(placement, view=lifted, use=use, store=store)


@functools.cache
def average() -> optax.GradientTransformation:
    """Make the default outer optimizer: it replaces the shared parameters by the mean of the replicas' parameters."""
    return optax.sgd(1.0)


def local(
    axis: AxisName = "replica",
    *,
    every: int,
    outer: optax.GradientTransformation | None = None,
    warmup: int = 0,
) -> Strategy:
    """Train a replica of the model on each index of a mesh axis, and average the replicas every few steps.

    The rows of a batch are split over the axis, and each replica takes ordinary steps of the layout's optimizer (the
    inner optimizer) on its rows. Gradients are reduced only inside a replica, over the other mesh axes, so that only a
    few scalars (the loss, norms) are communicated over the replicas' axis. After every `every`-th step the replicas'
    parameters are averaged, and the difference to the shared parameters is the gradient for the optimizer `outer`:

        outer gradient = shared - mean of the replicas' parameters        shared = shared + outer's update

    All replicas go on from the new shared parameters, and keep the inner optimizer's state. js.evaluate, js.logical,
    js.save and exports see the shared parameters. By default the replicas are averaged (Local SGD); with every=1 and
    SGD as the inner optimizer the run equals that of `js.ddp`.

    Combine it by `js.compose` with the strategy inside a replica, which may be any but `js.pipeline` and `js.expert`:
    js.compose(js.fsdp("data"), js.local("replica", every=32)).

    Memory: in addition to what the strategy inside a replica needs, the shared parameters and the state of `outer`
    (none by default; with momentum an array for every parameter), equal on all replicas and sharded inside a replica
    like the optimizer's state.

    Args:
      axis: the mesh axis of the replicas, best the axis with the slowest links; or a tuple of axes.
      every: the number of steps from one synchronisation to the next.
      outer: an optax transform for the shared parameters. None takes optax.sgd(1.0), which averages the replicas.
        DiLoCo uses optax.sgd(0.7, momentum=0.9, nesterov=True), for thousands of steps with hundreds between
        synchronisations: over many synchronisations its updates are 0.7 / (1 - 0.9) = 7 times as large as averaging,
        too large for a training of only hundreds of steps. For such a training optax.sgd(0.5, momentum=0.75,
        nesterov=True) after a `warmup` came closest to the loss of `js.ddp`: over many synchronisations its updates are
        0.5 / (1 - 0.75) = twice as large as averaging.
      warmup: the number of first steps that are taken as in `js.ddp`: gradients are averaged over replicas too,
        weighted by rows, before the inner optimizer (its clip by global norm included) sees them. After each such step
        all replicas and the shared parameters are equal, and `outer` is not used. Independent replicas cost most at the
        start of training, so use the number of warm-up steps of the learning rate. As in every step under js.local,
        each replica has its own random key. The loss must be a `js.Mean` (or a `js.Loss` with a `js.Mean`): the first
        step refuses a scalar, which does not say how to average over replicas.

    Returns:
      A strategy. Applied, it raises ValueError if the mesh has no such axis, another strategy splits arrays over it,
      the model has state besides parameters, or it is combined with `js.pipeline` or `js.expert`.

    Raises:
      ValueError: `every` or `warmup` is not an integer in range.
      TypeError: `outer` is no optax transform.

    References:
      Stich 2018, "Local SGD Converges Fast and Communicates Little"; Lin et al. 2018, "Don't Use Large
      Mini-Batches, Use Local SGD", for training that is local only after a first phase; Douillard et al. 2023,
      "DiLoCo", algorithm 1.

    Example:
        mesh = js.make_mesh(replica=2, data=4)
        strategy = js.compose(js.fsdp("data"), js.local("replica", every=32))
        layout = js.layout(strategy, mesh, init_fn, optax.adamw(3e-4))
    """
    for name, value, least in (("every", every, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"local: {name} must be a whole number from {least} on, got {value!r}")
    if outer is not None:
        check_transform(outer)
    return Local(axis_names(axis), every, average() if outer is None else outer, warmup)


def local_of(strategy: Strategy) -> Local | None:
    """Return the `js.local` among the parts of a strategy; None if there is none."""
    found = [part for part in parts_of(strategy) if isinstance(part, Local)]
    if len(found) > 1:
        raise ValueError("local: a strategy has one js.local; name all axes of the replicas in it, as a tuple")
    return found[0] if found else None


def with_replicas(layout: Layout, local: Local) -> Layout:
    """Return the layout for training several replicas, made from the layout of a single replica.

    Raises:
      ValueError: `js.local` is combined with something that it does not support; the message names it.
    """
    _check(layout, local)
    if layout.opt_state is None:
        return layout
    outer_shapes, outer = place_optimizer(layout, local.outer)
    trained, count = layout.trainable, local.replicas(layout.mesh)

    def copies(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree)

    def lift(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda placement: local.lift(placement, layout.mesh), tree)

    own = select(trained, layout.shapes.params)
    shapes = LocalState(copies(own), copies(layout.shapes.opt_state), (outer_shapes,))
    placements = LocalState(lift(select(trained, layout.params)), lift(layout.opt_state), (outer,))
    return replace(layout, opt_state=placements, shapes=layout.shapes._replace(opt_state=shapes), carried=local)


def inside_replica(layout: Layout) -> Layout:
    """Return the layout of a single replica, without the replicas' mesh axes: the inverse of `with_replicas`."""
    own = Composed(tuple(part for part in parts_of(layout.strategy) if not isinstance(part, Local)))
    placements, shapes = layout.opt_state, layout.shapes
    if placements is not None:
        inner = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), shapes.opt_state.inner)
        placements, shapes = jax.tree.map(Placement.drop_first, placements.inner), shapes._replace(opt_state=inner)
    return replace(layout, strategy=own, opt_state=placements, shapes=shapes, carried=None)


def _check(layout: Layout, local: Local) -> None:
    other = "js.pipeline" if layout.pipeline else "js.expert" if layout.expert else None
    if other:
        raise ValueError(f"local: {other} is not supported inside a replica; leave one of the two out")
    if layout.host_bytes_per_device():
        raise ValueError("local: js.offload is not supported under js.local; leave one of them out")
    if jax.tree.leaves(layout.state):
        raise ValueError(
            f"local: the model has state besides its parameters ({', '.join(paths(layout.state)[:3])}), which would "
            "differ between replicas; use a model without (layer or group normalisation), or leave js.local out"
        )
    raise_all(
        (
            f"{role} {leaf.path}: {placement.store}"
            for role, leaf, placement in layout.placed()
            if set(axes_of(placement.store)) & set(local.axis)
        ),
        ValueError,
        f"local: each replica has all parameters, so that nothing else may split arrays over {local.axis[0]!r}; use "
        "another axis there",
    )
