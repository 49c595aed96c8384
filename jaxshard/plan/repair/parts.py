"""The parts of a training step that a repair changes, and how the changed step is compared with promise and device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxshard.adapt.objective import Objective, OfBlocks
from jaxshard.adapt.stacked import Stacked
from jaxshard.checks.collectives.compare import Comparison, audit
from jaxshard.checks.parity import Parity, parity
from jaxshard.core.constrain import Activations, activations_in_force
from jaxshard.core.known_model import known_loss
from jaxshard.core.layout import Layout, select
from jaxshard.core.make_layout import layout as make_layout
from jaxshard.core.strategy import Strategy
from jaxshard.core.types import InitFn, LossFn, PyTree
from jaxshard.engines.engine import Engine, ValueAndGrad
from jaxshard.engines.just_in_time import Call, MakeMove
from jaxshard.plan.repair.rewrite import Change, Site, is_constraint, leave_out, list_sites, run_changed
from jaxshard.training.step import Step

MakeChange = Callable[[Activations | None], Change]
"""Makes a change of an equation for a layout; None in the optimizer, where activations have no names."""


@dataclass(frozen=True)
class Parts:
    """The parts of a training step, with the equations of its loss and of its optimizer that are changed.

    Attributes:
      init_fn, loss_fn, tx, strategy, mesh, batch, engine, trainable: as `js.parity` takes them.
      loss_changes: changed equations of the loss.
      tx_changes: changed equations of `tx.update`.
    """

    init_fn: InitFn
    loss_fn: LossFn
    tx: optax.GradientTransformation
    strategy: Strategy
    mesh: Mesh
    batch: PyTree
    engine: Engine
    trainable: Any = None
    loss_changes: Mapping[Site, MakeChange] = field(default_factory=dict)
    tx_changes: Mapping[Site, MakeChange] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """The layout of these parts."""
        return make_layout(self.strategy, self.mesh, self.init_fn, self.tx, trainable=self.trainable)

    def make_engine(self) -> Engine:
        """Return the engine that runs the changed loss."""
        return _with_changes(self.engine, self.loss_changes) if self.loss_changes else self.engine

    def make_tx(self) -> optax.GradientTransformation:
        """Return the changed optimizer."""
        return _with_changed_update(self.tx, self.tx_changes) if self.tx_changes else self.tx

    def make_step(self) -> Step:
        """Return the step of the changed parts."""
        return Step(self.loss_fn, self.make_tx(), self.layout, self.make_engine())

    def audit(self) -> tuple[Comparison, Traced]:
        """Compile the step and compare its collectives with its promise; also return what it was traced to."""
        traced, layout = Traced(), self.layout
        engine = _with_changes(self.engine, self.loss_changes, traced)
        comparison = audit(Step(self.loss_fn, self.make_tx(), layout, engine), self.batch)
        traced.tx = _trace_update(self.tx, layout)
        return comparison, traced

    def parity(self) -> Parity:
        """Compare the changed step with the loss and the optimizer as they were written, on one device."""
        loss_fn = self.loss_fn if known_loss(self.loss_fn) else _runs_on_one_device(self.loss_fn)
        tx = self.tx
        if any(map(is_constraint, list_sites(_trace_update(tx, self.layout)).values())):
            tx = _with_update(tx, _unconstrained(tx.update))
        return parity(
            self.init_fn, loss_fn, tx, self.strategy, self.mesh, self.batch,
            engine=self.make_engine(), trainable=self.trainable,
        )  # fmt: skip


@dataclass
class Traced:
    """The last traced loss, as the engine runs it, and the last traced update of the optimizer.

    Attributes:
      loss: one program, or of a pipeline those of embedding, block and head by name.
      tx: one program; None of an optimizer that can't be traced.
    """

    loss: Any = None
    tx: Any = None


def _with_changes(engine: Engine, changes: Mapping[Site, MakeChange], traced: Traced | None = None) -> Engine:
    """Return an engine of the same kind that changes equations of the loss, and notes the program it was traced to."""
    kind, traced = type(engine), traced or Traced()

    def make_call(self: Engine, objective: Objective, layout: Layout, make_move: MakeMove) -> Call:
        call = kind.make_call(self, objective, layout, make_move)
        made = {site: make(Activations(layout)) for site, make in changes.items()}

        def note(program: Any) -> Mapping[Site, Change]:
            traced.loss = program
            return made

        return lambda *args: _run_traced(call, args, note)

    def value_and_grad(self: Engine, objective: Objective, layout: Layout) -> ValueAndGrad:
        if isinstance(objective, OfBlocks):
            made = {site: make(Activations(layout)) for site, make in changes.items()}
            objective = replace(objective, model=_with_changed_parts(objective.model, made, traced))
        return kind.value_and_grad(self, objective, layout)

    # A pipeline runs the parts of a model in turns, not one loss.
    whole = kind.make_call is not Engine.make_call
    change: dict[str, Any] = {"make_call": make_call} if whole else {"value_and_grad": value_and_grad}
    subclass = type(kind.__name__, (kind,), change)
    own = {name: getattr(engine, name) for name in engine.__dataclass_fields__}
    changed: Engine = subclass(**own)
    return changed


def _with_changed_parts(model: Stacked, changes: Mapping[Site, Change], traced: Traced) -> Stacked:
    """Return a model with changed equations in its embedding, block and head, which notes what they are traced to."""
    programs: dict[str, Any] = {}
    traced.loss = programs

    def changed(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        def note(program: Any) -> Mapping[Site, Change]:
            programs[name] = program
            return changes

        return lambda *args: _run_traced(fn, args, note)

    copied = copy(model)
    copied.embed, copied.block, copied.head = (
        changed(name, getattr(model, name)) for name in ("embed", "block", "head")
    )
    return copied


def _with_changed_update(
    tx: optax.GradientTransformation, changes: Mapping[Site, MakeChange]
) -> optax.GradientTransformation:
    made = {site: make(None) for site, make in changes.items()}
    return _with_update(tx, lambda *args, **extra: _run_traced(tx.update, args, lambda _: made, **extra))


def _with_update(tx: optax.GradientTransformation, update: Any) -> optax.GradientTransformation:
    """Return an optimizer with another update; one that is another object, such as optax.MultiSteps, as a pair."""
    takes_more = isinstance(tx, optax.GradientTransformationExtraArgs)
    return (optax.GradientTransformationExtraArgs if takes_more else optax.GradientTransformation)(tx.init, update)


def _unconstrained(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function without its constraints, which can't be kept on one device and change no value."""

    def changes(program: Any) -> Mapping[Site, Change]:
        return {site: leave_out for site, eqn in list_sites(program).items() if is_constraint(eqn)}

    return lambda *args, **options: _run_traced(fn, args, changes, **options)


def _runs_on_one_device(loss_fn: LossFn) -> LossFn:
    """Return the loss, outside of a sharded step without its constraints."""

    def loss(*args: Any) -> Any:
        return (_unconstrained(loss_fn) if activations_in_force() is None else loss_fn)(*args)

    return loss


def _trace_update(tx: Any, layout: Layout) -> Any:
    """Trace an optimizer's update on the shapes of a run; None for one that asks for more than gradients."""
    params = select(layout.trainable, layout.shapes.params)
    try:
        return jax.make_jaxpr(tx.update)(params, layout.shapes.opt_state, params)
    except TypeError:
        return None


def _run_traced(
    fn: Callable[..., Any], args: tuple[Any, ...], changes: Callable[[Any], Mapping[Site, Change]], **options: Any
) -> Any:
    """Trace `fn`, and run its program with the changes that are wanted of it."""
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten((args, options))
    # What is no array, such as a function that an optimizer is given, stays out of the program.
    arrays = [n for n, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]

    def flat(*values: Any) -> Any:
        whole = list(leaves)
        for n, value in zip(arrays, values, strict=True):
            whole[n] = value
        given, named = structure.unflatten(whole)
        return fn(*given, **named)

    values = [leaves[n] for n in arrays]
    program, shapes = jax.make_jaxpr(flat, return_shape=True)(*values)
    results: Any = jax.tree.structure(shapes)
    return results.unflatten(run_changed(program, values, changes(program)))
