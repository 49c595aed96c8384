"""Whether the sharded step equals the step on one device: both are run, and every array is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxshard.checks.causes import Ratio, Suspect, causes
from jaxshard.checks.difference import Difference, differences, loss_difference, numbers
from jaxshard.core.compat import unbound_axis_name
from jaxshard.core.keys import typed_key
from jaxshard.core.layout import Layout, check_transform, join_model, put_back, select, split_model
from jaxshard.core.loss import Loss, Mean, as_loss
from jaxshard.core.make_layout import layout
from jaxshard.core.placement import Placement
from jaxshard.core.strategy import Strategy
from jaxshard.core.text_table import align_columns
from jaxshard.core.tree import abstract, paths
from jaxshard.core.types import InitFn, LossFn, PyTree
from jaxshard.engines.accumulate import next_state
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine
from jaxshard.training.state import init, run_key
from jaxshard.training.step import Step, check_batch

DIFFERS = "DIFFERS"
"""The verdict at the end of a line."""

_LOSS = 0.1
"""How much of the tolerance is the loss's."""


@dataclass(frozen=True)
class Parity:
    """What `parity` found. Prints as a table; `ok` says whether all is equal, `check()` raises where it is not.

    `losses` are the sharded and the one-device loss, `where` says what ran. `why` names the causes that the numbers
    point to, and the way out; `notes` what was changed for the comparison.
    """

    where: str
    losses: tuple[float, float]
    differences: tuple[Difference, ...]
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[Difference, ...]:
        """What differs by more than is allowed."""
        return tuple(one for one in self.differences if not one.ok)

    def check(self) -> None:
        """Nothing if all is equal, else an AssertionError with the report, which names every leaf that differs."""
        if not self.ok:
            names = ", ".join(one.name for one in self.failures)
            raise AssertionError(f"the sharded step differs from one device in {names}\n{self}")

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.table(), *self.remarks])

    @property
    def headline(self) -> str:
        """What was compared, and the outcome, in one line."""
        count = len(self.differences)
        told = f"all {count} arrays agree" if self.ok else f"{len(self.failures)} of {count} arrays differ"
        return f"{self.where} against one device, in f32: {told}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is odd about single leaves, the causes and the notes, a line each."""
        odd: dict[str, list[str]] = {}
        for one in self.failures:
            odd.setdefault(one.note, []).append(one.name)
        lines = [f"not finite: {', '.join(names)}: {note}" for note, names in odd.items() if note]
        return (*lines, *(f"why: {text}" for text in self.why), *(f"note: {text}" for text in self.notes))

    def table(self) -> list[str]:
        """The lines between headline and remarks: the loss, then a table with a line per leaf, and each verdict."""
        kinds = [kind for kind in ("gradient", "update", "state") if any(d.what == kind for d in self.differences)]
        allowed = {one.what: f"{one.allowed:.0e}" for one in self.differences if one.allowed}
        loss, *arrays = self.differences
        leaves: dict[str, dict[str, Difference]] = {}
        for one in arrays:
            leaves.setdefault(one.leaf, {})[one.what] = one
        rows = [("", *kinds, ""), ("allowed", *(allowed.get(kind, "0") for kind in kinds), "")]
        for leaf, found in leaves.items():
            cells = (str(found[kind]) if kind in found else "" for kind in kinds)
            rows.append((leaf, *cells, _verdict(list(found.values()))))
        ours, theirs = self.losses
        apart = f"{loss} apart, allowed {loss.allowed:.0e}  {_verdict([loss])}"
        return [
            f"  loss {ours:.6g}, on one device {theirs:.6g}: {apart}",
            *(f"  {line}" for line in align_columns(rows)),
        ]


def parity(
    init_fn: InitFn,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    strategy: Strategy,
    mesh: Mesh,
    batch: PyTree,
    *,
    engine: Engine | None = None,
    key: jax.Array | int = 0,
    tolerance: float = 1e-5,
    trainable: PyTree | Callable[[str], bool] = lambda path: True,
) -> Parity:
    """The report of one step, sharded over the mesh, against the same step on one device in plain JAX.

    Both sides have the same parameters (those of `init_fn(key)`), global batch and key, all floating arrays in f32,
    products in full f32 precision (GPUs and TPUs take less by default), and no lower precision in the engine. The loss
    must agree to a tenth of `tolerance` relative; gradients, updates and the model's new state to `tolerance`, per
    leaf: the largest difference over the larger of the leaf's largest magnitude and 1e-3 of the tree's. A gradient that
    is under 1e-6 of the tree's largest on both sides counts as zero: that of a bias before BatchNorm, or of a key's, is
    nothing but rounding. Keep the batch small (512 tokens): long sums lose digits.

    `tx` updates twice, given the same gradients on both sides (those of one
    device), and the second updates are compared, so that neither Adam's amplification of rounding nor a rate that warms
    up from zero blurs the comparison; integers must be equal.

    One program is compiled for one device and one for the mesh, whose devices may be simulated. The step on one device
    is that of a loss that sees the whole batch: `js.parity(...).check()` in a test tells whether a loss may run under
    `js.explicit()`.

    Raises:
      ValueError: the mesh has no devices of this process; all that `js.layout` and `js.make_step` refuse.
      TypeError: a loss that the engine refuses.
    """
    if not isinstance(mesh, Mesh) or any(d.process_index != jax.process_index() for d in mesh.devices.flat):
        raise ValueError("parity: it runs the step, so the mesh must be made of this process's own devices")
    check_transform(tx)
    with jax.default_matmul_precision("float32"):
        return _compare(
            init_fn, loss_fn, tx, strategy, mesh, batch, engine or auto(), typed_key(key), tolerance, trainable
        )


def _compare(
    init_fn: InitFn,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    strategy: Strategy,
    mesh: Mesh,
    batch: PyTree,
    engine: Engine,
    seed: jax.Array,
    tolerance: float,
    trainable: PyTree | Callable[[str], bool],
) -> Parity:
    """`parity` with everything checked and filled in."""
    first, notes = mesh.devices.flat[0], _Notes()
    engine = notes.engine(engine)
    with jax.default_device(first):
        batch = notes.f32("batch", jax.tree.map(np.asarray, batch))
        model = jax.jit(init_fn)(jax.device_put(seed, first))
        start = notes.f32("parameters", model)
        make = init_fn if start is model else _in_f32(init_fn)
        both = _recorded(tx)
        plan = layout(strategy, mesh, make, both, trainable=trainable)
        step = Step(loss_fn, both, plan, engine, guarded=False)  # what is not finite is to be seen
        check_batch(plan, abstract(batch), engine.microbatches)
        step_key = jax.random.fold_in(run_key(seed), 0)
        alone = _alone(loss_fn, tx, plan, start, batch, step_key, notes)
    run = init(make, both, plan, seed, init_from=start)
    given = jax.tree.map(partial(_put, mesh), alone.grads, plan.opt_state["given"])
    run, metrics = step(run._replace(opt_state=run.opt_state | {"given": given}), batch)
    loss, expected = float(metrics["loss"]), float(alone.loss)
    grads = _in_model_order(plan.opt_state["grads"], run.opt_state["grads"])
    pairs = [
        ("gradient", grads, alone.grads),
        ("update", _in_model_order(plan.opt_state["updates"], run.opt_state["updates"]), alone.updates),
        ("state", _in_model_order(plan.state, run.state), alone.state),
    ]
    found = [loss_difference(loss, expected, _LOSS * tolerance)]
    found += [one for what, ours, theirs in pairs for one in differences(what, ours, theirs, tolerance)]
    notes.unmoved(alone.updates)
    report = Parity(_where(mesh, engine), (loss, expected), tuple(found), notes=tuple(notes.lines))
    if report.ok or not np.isfinite(expected):
        return report
    params, state = split_model(start)
    ratios = _ratios(report, loss, expected, grads, alone.grads)
    suspect = Suspect(loss_fn, join_model(params, state), batch, step_key, plan, engine, alone.bind)
    return replace(report, why=causes({one.what for one in report.failures}, ratios, suspect))


class _Alone(NamedTuple):
    """What one device computes; `bind` makes a function of the loss runnable there."""

    loss: jax.Array
    grads: PyTree
    updates: PyTree
    state: PyTree
    bind: Callable[[Callable], Callable]


def _alone(
    loss_fn: LossFn, tx: Any, plan: Layout, model: PyTree, batch: PyTree, key: jax.Array, notes: _Notes
) -> _Alone:
    """The plain step on one device. Reference: value_and_grad of the loss, then tx.update twice."""
    params, state = split_model(model)
    mask = plan.trainable

    def objective(chosen: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        loss: Loss = as_loss(loss_fn(join_model(put_back(mask, chosen, params), state), batch, key))
        value = loss.value.value if isinstance(loss.value, Mean) else loss.value
        return value, next_state(state, loss)

    def step(chosen: PyTree, batch: PyTree) -> tuple[Any, ...]:
        (loss, state), grads = jax.value_and_grad(objective, has_aux=True)(chosen, batch)
        return loss, grads, state

    def update(grads: PyTree, chosen: PyTree) -> PyTree:
        return _twice(tx, grads, tx.init(chosen), chosen)[0]

    chosen = select(mask, params)
    bind = _bind(step, plan.mesh, (chosen, batch), notes)
    loss, grads, state = jax.jit(bind(step))(chosen, batch)
    return _Alone(loss, grads, jax.jit(update)(grads, chosen), state, bind)


def _bind(fn: Callable, mesh: Mesh, args: tuple[Any, ...], notes: _Notes) -> Callable[[Callable], Callable]:
    """What makes a function that names the mesh's axes runnable on one device: there they have one member."""
    try:
        jax.eval_shape(fn, *args)
        return lambda fn: fn
    except NameError as error:
        if unbound_axis_name(error) not in mesh.axis_names:
            raise
    notes.lines.append("the loss names mesh axes, so that on one device they were given size 1")
    shape = (1,) * len(mesh.axis_names)
    one = Mesh(mesh.devices.flat[:1].reshape(shape), mesh.axis_names, axis_types=(AxisType.Auto,) * len(shape))

    def bind(fn: Callable) -> Callable:
        return jax.shard_map(fn, mesh=one, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)

    return bind


def _recorded(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` fed with the gradients in its state, "given"; keeps what it was really fed and what it made there too."""

    def start(params: PyTree) -> dict[str, PyTree]:
        empty = {name: jax.tree.map(jnp.zeros_like, params) for name in ("given", "grads", "updates")}
        return empty | {"inner": tx.init(params)}

    def update(grads: PyTree, state: dict[str, PyTree], params: PyTree | None = None) -> Any:
        updates, inner = _twice(tx, state["given"], state["inner"], params)
        return updates, {"given": state["given"], "grads": grads, "updates": updates, "inner": inner}

    return optax.GradientTransformation(start, update)


def _twice(tx: Any, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    _, state = tx.update(grads, state, params)
    return tx.update(grads, state, params)


class _Notes:
    """Collects what was changed for the comparison."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def engine(self, engine: Engine) -> Engine:
        if not isinstance(engine, Engine) or (engine.compute_dtype is None and engine.reduce_dtype is None):
            return engine  # make_step refuses what is none
        self.lines.append("compute_dtype and reduce_dtype of the engine were left out: all is computed in f32")
        return replace(engine, compute_dtype=None, reduce_dtype=None)

    def f32(self, what: str, tree: PyTree) -> PyTree:
        """The tree with floating arrays of lower precision in f32; itself where there are none."""
        low = {str(x.dtype): None for x in jax.tree.leaves(tree) if _is_low(x)}
        if not low:
            return tree
        self.lines.append(f"{what} in {', '.join(low)} were cast to float32")
        return jax.tree.map(lambda x: x.astype(np.float32) if _is_low(x) else x, tree)

    def unmoved(self, updates: PyTree) -> None:
        if not any(np.any(np.asarray(x)) for x in jax.tree.leaves(updates)):
            self.lines.append("all updates are zero on one device, so that nothing is said about the optimizer")


def _is_low(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4


def _in_f32(init_fn: InitFn) -> InitFn:
    """Make a function like `init_fn` whose floating parameters of lower precision are f32."""
    return lambda key: jax.tree.map(lambda x: x.astype(jnp.float32) if _is_low(x) else x, init_fn(key))


def _put(mesh: Mesh, x: jax.Array, placement: Placement) -> jax.Array:
    """One device's array as the layout stores it."""
    return jax.device_put(placement.view.apply(np.asarray(x)), placement.sharding(mesh))  # type: ignore[arg-type]


def _in_model_order(placements: PyTree, stored: PyTree) -> PyTree:
    """Stored arrays as one device has them."""
    return jax.tree.map(lambda x, placement: placement.view.invert(numbers(x)), stored, placements)


def _where(mesh: Mesh, engine: Engine) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{axes} under js.{engine.describe()['engine']}()"


def _ratios(report: Parity, loss: float, expected: float, grads: PyTree, others: PyTree) -> list[Ratio]:
    """By what constant factors the loss and the gradients that differ are off, where they are."""
    failed = {one.leaf for one in report.failures if one.what == "gradient"}
    pairs = [
        (path, a, numbers(b)) for path, a, b in zip(paths(others), jax.tree.leaves(grads), jax.tree.leaves(others))
    ]
    found = [Ratio(f"gradient {path}", a, b) for path, a, b in pairs if path in failed]
    return found if report.differences[0].ok else [Ratio("loss", np.asarray(loss), np.asarray(expected)), *found]


def _verdict(found: list[Difference]) -> str:
    return "ok" if all(one.ok for one in found) else DIFFERS
