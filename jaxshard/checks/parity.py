"""Run a sharded step and the same step on one device, and compare every array: `js.parity`.

The step on one device is plain JAX and optax, ten lines in `_OneDevice`. The sharded step is that of `js.make_step`,
which returns only the new parameters and optimizer state. So the optimizer is wrapped (`_record`): its state keeps a
copy of the gradients and updates, and updates are computed from given gradients instead of the step's. Gradients and
updates are compared separately, because an optimizer such as Adam turns a rounding difference in a gradient near zero
into a full step of the parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxshard.adapt.model_state import next_state
from jaxshard.checks.causes import Bind, find_causes, loss_of_parts
from jaxshard.checks.collectives.inserted import warn_of_inserted
from jaxshard.checks.difference import Difference, compare_losses, compare_trees, to_numpy
from jaxshard.checks.separating import make_separating
from jaxshard.core.average import is_average
from jaxshard.core.compat import unbound_axis_name
from jaxshard.core.foreign_arrays import as_arrays
from jaxshard.core.keys import typed_key
from jaxshard.core.layout import Layout, join_model, put_back, select, split_model
from jaxshard.core.loss import Loss, Mean, as_loss
from jaxshard.core.mesh import axis_size, mesh_str
from jaxshard.core.settings import no_mesh, own_settings
from jaxshard.core.stored import unstore
from jaxshard.core.strategy import Strategy
from jaxshard.core.text_table import Table, page
from jaxshard.core.transform import check_transform
from jaxshard.core.types import InitFn, LossFn, PyTree
from jaxshard.engines.auto import auto
from jaxshard.engines.counted_rows import UnequalMeans
from jaxshard.engines.engine import Engine
from jaxshard.engines.just_in_time import users_code
from jaxshard.optim.layout import layout
from jaxshard.optim.local import local_of
from jaxshard.training.extra_args import find_extra_args, take_fast_gradients
from jaxshard.training.metrics.writer import finite
from jaxshard.training.placing import put_stored
from jaxshard.training.progress import View
from jaxshard.training.progress_views import telling
from jaxshard.training.state import TrainState, init, run_key
from jaxshard.training.step import Step

GIVEN = "the given one"
SECOND = "the given one in a second step, with the state moved by a factor"

DIFFERS = "DIFFERS"
"""The verdict at the end of a line of the table."""

_LOSS_SHARE = 0.1
"""The relative difference allowed for the loss, as a share of the tolerance."""


@dataclass(frozen=True)
class Parity:
    """The report of `js.parity`. Prints as a table with a line for every leaf.

    Attributes:
      where: the mesh and the engine: "data=8 under js.explicit()", "data=8 under js.auto(microbatches=2)".
      losses: the loss of the sharded step, and the loss of one device.
      differences: the loss first, then every gradient, update and array of the model's state; only the loss if the
        engine refuses the loss function because the weight of its `js.Mean` does not count rows.
      why: the likely causes of the differences, each with its remedy; () if all arrays agree or no cause is found.
      notes: what was changed for the comparison, such as casts to f32.
      batches: the names of the batches that were compared, up to the first batch with a difference. The first is the
        given batch. If the engine gives each device its own rows, variants of the given batch follow, in which the rows
        of different devices differ more. All other attributes are of the last batch.
    """

    where: str
    losses: tuple[float, float]
    differences: tuple[Difference, ...]
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    batches: tuple[str, ...] = (GIVEN,)

    @property
    def ok(self) -> bool:
        """True if all arrays agree."""
        return not self.failures

    @property
    def failures(self) -> tuple[Difference, ...]:
        """The arrays that differ by more than is allowed."""
        return tuple(one for one in self.differences if not one.ok)

    def check(self) -> None:
        """Raise an AssertionError with the report, which names every leaf that differs, unless all arrays agree."""
        if not self.ok:
            names = ", ".join(one.name for one in self.failures)
            raise AssertionError(f"the sharded step differs from one device in {names}\n{self}")

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.table(), *self.remarks])

    def _repr_html_(self) -> str:
        """Format the report as HTML for a notebook."""
        return page(self.headline, self._loss_line(), self._leaves(), *self.remarks)

    @property
    def headline(self) -> str:
        """One line with what was compared, and the outcome."""
        count = len(self.differences)
        outcome = f"all {count} arrays agree" if self.ok else f"{len(self.failures)} of {count} arrays differ"
        return f"{self.where} against one device, in f32: {outcome}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """The last lines of the report: leaves that are not finite, likely causes, notes, and the compared batches."""
        odd: dict[str, list[str]] = {}
        for one in self.failures:
            odd.setdefault(one.note, []).append(one.name)
        lines = [f"not finite: {', '.join(names)}: {note}" for note, names in odd.items() if note]
        return (
            *lines,
            *(f"why: {text}" for text in self.why),
            *(f"note: {text}" for text in self.notes),
            *self._tell_batches(),
        )

    def _tell_batches(self) -> tuple[str, ...]:
        *before, last = self.batches
        if not before:
            return ()
        if not self.ok:
            return (f"batch: {last}; no difference with {', '.join(before)}",)
        return (
            f"shown for {len(self.batches)} batches: {', '.join(self.batches)}",
            "not shown: that no other batch differs; js.auto() with one micro-batch is right for any loss",
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for JSON: ok, loss, arrays, failures, why, notes, batches.

        Numbers that are not finite become None.
        """
        arrays = [
            {name: getattr(one, name) for name in ("what", "leaf", "allowed", "ok")} | {"difference": finite(one.error)}
            for one in self.differences
        ]
        report = {name: list(getattr(self, name)) for name in ("why", "notes", "batches")}
        losses = dict(zip(("sharded", "one_device"), map(finite, self.losses)))
        failures = [one.name for one in self.failures]
        return {"ok": self.ok, "loss": losses, "arrays": arrays, "failures": failures} | report

    def table(self) -> list[str]:
        """Return the lines of the report's table: the loss, then one line per leaf, each with its verdict."""
        return [f"  {line}" for line in (self._loss_line(), *self._leaves().lines)]

    def _loss_line(self) -> str:
        loss, *_ = self.differences
        ours, theirs = self.losses
        apart = f"{loss} apart, allowed {loss.allowed:.0e}  {_verdict([loss])}"
        return f"loss {ours:.6g}, on one device {theirs:.6g}: {apart}"

    def _leaves(self) -> Table:
        kinds = [kind for kind in ("gradient", "update", "state") if any(d.what == kind for d in self.differences)]
        allowed = {one.what: f"{one.allowed:.0e}" for one in self.differences if one.allowed}
        leaves: dict[str, dict[str, Difference]] = {}
        for one in self.differences[1:]:
            leaves.setdefault(one.leaf, {})[one.what] = one
        rows = [("allowed", *(allowed.get(kind, "0") for kind in kinds), "")] if leaves else []
        for leaf, found in leaves.items():
            cells = (str(found[kind]) if kind in found else "" for kind in kinds)
            rows.append((leaf, *cells, _verdict(list(found.values()))))
        return Table(rows, head=("", *kinds, "") if leaves else ())


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
    trainable: PyTree | Callable[[str], bool] | None = None,
    progress: bool | View | None = None,
) -> Parity:
    """Compare one step, sharded over the mesh, with the same step on one device in plain JAX.

    Both sides have the same parameters (from `init_fn(key)`), global batch and key. All floating arrays are in f32,
    products in full f32 precision (GPUs and TPUs take less by default), and dtypes of lower precision in the engine are
    ignored. On one device the loss sees all rows of the batch, so `js.parity(...).check()` in a test tells whether a
    loss may run under `js.explicit()`.

    The loss must agree to a tenth of `tolerance`, relative; gradients, updates and the model's new state to
    `tolerance`, per leaf: the largest difference over the larger of the leaf's largest magnitude and 1e-3 of the
    tree's. A gradient below 1e-6 of the tree's largest magnitude on both sides counts as zero: the gradient of a bias
    before BatchNorm, for example, is only rounding error. Integers must be equal.

    A second step follows, with the same parameters, another key, and the first step's new state with its floats times
    1.25, because a state of zeros or a copy of the parameters hides errors. The notes say what is proven of each array
    of the state, and how devices and micro-batches combine it (see `js.Loss`).

    On both sides `tx` updates twice from the same gradients (of one device), and the second updates are compared.
    So neither Adam's amplification of rounding nor a learning rate that warms up from zero affects the comparison.

    If an engine gives each device its own rows, a single batch may hide that the loss depends on all rows, for example
    by a branch on their mean. So variants of the batch are compared too, in which the rows of different devices differ
    more: the rows are sorted, or every device gets copies of one row, or the floats of different devices are moved
    apart (`Parity.batches`). This finds differences; it cannot prove that there are none.

    If the engine refuses the loss because the weight of its `js.Mean` does not count rows, nothing runs over the mesh.
    Then the loss is computed on one device from the parts of the batch, and the report has the message of the error.

    One program is compiled for one device and one for the mesh, whose devices may be simulated. Nearly all of the time
    is their compilation: seconds for a small model, minutes for a deep one. Try a model of few layers first. Keep the
    batch small (512 tokens): long sums lose digits.

    Args:
      init_fn: `init_fn(key) -> parameters | js.Model(params, state)`.
      loss_fn: `loss_fn(model, batch, key)`.
      tx: an optax transform.
      strategy: the strategy, as `js.layout` takes it.
      mesh: the mesh, of devices of this process.
      batch: a global batch, every array [batch, ...].
      engine: the engine; `js.auto()` by default.
      key: a random key or a seed, for parameters and step.
      tolerance: the largest relative error.
      trainable: which parameters are trained, as `js.layout` takes it.
      progress: by default a live line on a terminal or in a notebook says what is compiled or compared, and for how
        long. Otherwise as for `js.fit`: True also in a pipe or file, False never, or a function of a `js.Progress`.

    Returns:
      The report. It does not raise if arrays differ: `check()` does.

    Raises:
      ValueError: the mesh has devices of other processes, or `js.layout` or `js.make_step` refuses something.
      TypeError: the engine refuses the loss, or `tx` is no optax transform.

    Example:
          def test_my_loss_may_run_under_explicit():
              mesh = js.make_mesh(data=8)
              js.parity(init_fn, loss_fn, tx, js.fsdp(), mesh, batch, engine=js.explicit()).check()
    """
    _check_comparable(strategy, mesh)
    check_transform(tx)
    engine, first = engine or auto(), mesh.devices.flat[0]
    with own_settings(mesh):
        seed = typed_key(key)
    notes: list[str] = []
    engine = _in_f32(engine, notes)
    batch = as_arrays("the batch", batch)
    with own_settings(mesh), jax.default_matmul_precision("float32"), telling(progress) as tell:
        tell("compiling for one device")
        with no_mesh(), jax.default_device(first):
            batch = _to_f32("batch", jax.tree.map(np.asarray, batch), notes)
            model = jax.jit(init_fn)(jax.device_put(seed, first))
            start = _to_f32("parameters", model, notes)
            make = init_fn if start is model else lambda key: _to_f32("parameters", init_fn(key), [])
            tx = _with_stand_ins(tx, split_model(start)[0], notes)
            both = _record(tx)
            plan = layout(strategy, mesh, make, both, trainable=trainable)
            step = Step(loss_fn, both, plan, engine, guarded=False)  # the report shows numbers that are not finite
            plan.plan_batch(batch).check(engine.microbatches, whole=engine.shows_whole_batch)
            alone = _OneDevice(loss_fn, plan, start, batch, seed, notes)
            first_step = _Trial(GIVEN, batch, split_model(start)[1], 0)
            expected = alone.step(first_step)
            updates = jax.jit(partial(_update_alone, tx))(expected.grads, alone.chosen)
            after = put_back(plan.trainable, optax.apply_updates(alone.chosen, updates), split_model(start)[0])
        where = f"{mesh_str(mesh)} under {_call_of(engine)}"
        tell(f"compiling for {where}")
        try:
            compiled = step.compile(batch)
        except UnequalMeans as refusal:
            losses = loss_of_parts(step, start, batch, alone.key_of(first_step), alone.bind), float(expected.loss)
            report = _report_refused(where, losses, refusal, notes, _LOSS_SHARE * tolerance)
            if report.ok:  # the loss is right, and a metric is refused
                raise
            return report
        # Checked before it runs: a step whose devices wait for each other would not end.
        warn_of_inserted(step.choices, compiled, mesh)
        run = init(make, both, plan, seed, init_from=start)
        given = jax.tree.map(partial(put_stored, layout=plan), expected.grads, plan.opt_state["given"])
        run = run._replace(opt_state=run.opt_state | {"given": given})
        compare = _Comparison(where, step, run, updates, after, tolerance, notes, tell)
        if not any(np.any(np.asarray(x)) for x in jax.tree.leaves(updates)):
            notes.append("all updates are zero on one device, so that the optimizer is not compared")
        trial, report, tried = first_step, compare(first_step, expected), [GIVEN]
        notes += _tell_state(step, batch) if report.ok else []
        # A state that starts as a copy of the parameters, or as zeros, hides errors in its update.
        moved = jax.tree.map(_perturb, _with_averages(first_step, expected.state, after))
        parts = 1 if engine.compiler_chooses else engine.microbatches * axis_size(mesh, plan.batch_axes)
        others = itertools.chain([(SECOND, batch)], make_separating(batch, plan.rows_mask(batch), parts))
        for name, other in others if report.ok else ():
            trial = _Trial(name, other, moved, 1)
            with no_mesh(), jax.default_device(first):
                expected = alone.step(trial)
            if not all(np.isfinite(to_numpy(x)).all() for x in jax.tree.leaves((expected.loss, expected.grads))):
                notes.append(f"{name}: not finite on one device, so that this batch says nothing")
                continue
            report = compare(trial, expected)
            if not report.ok or name != SECOND:
                tried.append(name)
            if not report.ok:
                break
        report = replace(report, batches=tuple(tried), notes=tuple(notes))
        if report.ok or not np.isfinite(report.losses[1]):
            return report
        model, key = join_model(split_model(start)[0], trial.state), alone.key_of(trial)
        return replace(report, why=find_causes(report.failures, step, model, trial.batch, key, alone.bind))


def _call_of(engine: Engine) -> str:
    """Write the call that makes the engine, such as "js.auto(microbatches=2)", without its other settings."""
    parts = f"microbatches={engine.microbatches}" if engine.microbatches > 1 else ""
    return f"js.{engine.name}({parts})"


def _report_refused(
    where: str, losses: tuple[float, float], refusal: UnequalMeans, notes: list[str], allowed: float
) -> Parity:
    """Make the report for a loss that the engine refuses, whose step was not run.

    Args:
      where: the mesh and the engine.
      losses: the loss computed from the parts of the batch, and the loss of the full batch.
      refusal: the error of the engine.
      notes: the notes of the report.
      allowed: the largest relative error of the loss.
    """
    told = "the step refuses this loss and was not run: its loss here is that of the parts of the batch, added up"
    return Parity(
        where, losses, (compare_losses(*losses, allowed),), why=tuple(str(refusal).splitlines()), notes=(*notes, told)
    )


def _check_comparable(strategy: Strategy, mesh: Mesh) -> None:
    if not isinstance(mesh, Mesh) or any(d.process_index != jax.process_index() for d in mesh.devices.flat):
        raise ValueError("parity: it runs the step, so the mesh must be made of this process's own devices")
    if local_of(strategy) is not None:
        raise ValueError(
            "parity: replicas that train by themselves (js.local) take other steps than one device does on the whole "
            "batch; check the strategy inside a replica, without js.local, on a mesh without its axis"
        )


def _in_f32(engine: Engine, notes: list[str]) -> Engine:
    """Return the engine without its options for lower precision, so that all is computed in f32; note it in `notes`.

    Anything that is not an engine is returned unchanged: `js.make_step` raises the error.
    """
    exact: dict[str, Any] = {"compute_dtype": None, "reduce_dtype": None, "gather_dtype": None}
    if not isinstance(engine, Engine) or not (given := [name for name in exact if getattr(engine, name) is not None]):
        return engine
    notes.append(f"{' and '.join(given)} of the engine left out: all is computed in f32")
    return replace(engine, **exact)


class _Trial(NamedTuple):
    """The inputs of one step that is computed both over the mesh and on one device.

    Attributes:
      name: how the batch was made, such as "rows sorted by tokens".
      batch: the global batch.
      state: the model's state before the step.
      number: the step's number, from 0 on.
    """

    name: str
    batch: PyTree
    state: PyTree
    number: int


def _perturb(x: jax.Array) -> jax.Array:
    return x * 1.25 if jnp.issubdtype(x.dtype, jnp.floating) else x


def _with_averages(trial: _Trial, new: PyTree, params: PyTree) -> PyTree:
    """Return the new state on one device, with each `js.Average` updated from the new parameters."""

    def choose(old: Any, new: Any) -> Any:
        return old.next(params, jnp.int32(trial.number)) if is_average(old) else new

    return jax.tree.map(choose, trial.state, new, is_leaf=is_average)


def _tell_state(step: Step, batch: PyTree) -> list[str]:
    """Describe for each array of the model's state how devices combine their values, and what is proven about it."""
    layout = step.layout
    if not jax.tree.leaves(layout.shapes.state):
        return []
    rules = step.engine.state_rules(step.objective, layout, batch)
    if rules is None:
        return ["state: the loss sees the whole batch, so that what it returns is the new state"]
    return [*rules.describe(), "state: its floats times 1.25 in a second step, from the same parameters"]


class _Results(NamedTuple):
    """The loss, the gradients and the model's new state of a step on one device."""

    loss: jax.Array
    grads: PyTree
    state: PyTree


@dataclass(frozen=True)
class _Comparison:
    """Runs the step over the mesh and compares it with the results of one device.

    Attributes:
      where: the mesh and the engine.
      step: the sharded step.
      run: the TrainState of the sharded step; its optimizer state has the gradients computed on one device, from which
        both sides update.
      updates: the optimizer's updates from these gradients, computed on one device.
      after: the parameters after these updates.
      tolerance: the largest relative error.
      notes: the notes of the report.
      tell: is told which batch is compared.
    """

    where: str
    step: Step
    run: TrainState
    updates: PyTree
    after: PyTree
    tolerance: float
    notes: list[str]
    tell: Callable[[str], None]

    def __call__(self, trial: _Trial, expected: _Results) -> Parity:
        """Run the sharded step of a trial and compare its loss, gradients, updates and new state with `expected`."""
        self.tell(f"comparing the batch: {trial.name}")
        plan = self.step.layout
        state = jax.tree.map(partial(put_stored, layout=plan), trial.state, plan.state)
        number = jnp.full_like(self.run.step, trial.number)
        new, metrics = self.step(jax.tree.map(jnp.copy, self.run._replace(state=state, step=number)), trial.batch)
        losses = float(metrics["loss"]), float(expected.loss)
        found = [compare_losses(*losses, _LOSS_SHARE * self.tolerance)]
        for what, placements, ours, theirs in (
            ("gradient", plan.opt_state["grads"], new.opt_state["grads"], expected.grads),
            ("update", plan.opt_state["updates"], new.opt_state["updates"], self.updates),
            ("state", plan.state, new.state, _with_averages(trial, expected.state, self.after)),
        ):
            found += compare_trees(what, unstore(placements, jax.tree.map(to_numpy, ours)), theirs, self.tolerance)
        return Parity(self.where, losses, tuple(found), notes=tuple(self.notes))


class _OneDevice:
    """The plain step on one device: value_and_grad of the loss.

    Attributes:
      chosen: the trained parameters.
      bind: wraps a function so that it runs on one device even if it names mesh axes, as `lax.pmean(x, "data")` does.
    """

    def __init__(self, loss_fn: LossFn, plan: Layout, model: PyTree, batch: PyTree, seed: jax.Array, notes: list[str]):
        params, state = split_model(model)
        mask = plan.trainable

        def objective(chosen: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
            loss: Loss = as_loss(loss_fn(join_model(put_back(mask, chosen, params), state), batch, key))
            value = loss.value.value if isinstance(loss.value, Mean) else loss.value
            return value, next_state(state, loss)

        def step(*args: Any) -> _Results:
            (loss, state), grads = jax.value_and_grad(objective, has_aux=True)(*args)
            return _Results(loss, grads, state)

        self.chosen, self._seed = select(mask, params), seed
        self.bind = _make_bind(step, plan, (self.chosen, state, batch, seed), notes)
        self._step = jax.jit(self.bind(step))

    def key_of(self, trial: _Trial) -> jax.Array:
        """Return the random key that the loss receives in the step of a trial, the same as in the sharded step."""
        return jax.random.fold_in(run_key(self._seed), trial.number)

    def step(self, trial: _Trial) -> _Results:
        """Compute the loss, gradients and new state of a trial's step."""
        results: _Results = self._step(self.chosen, trial.state, trial.batch, self.key_of(trial))
        return results


def _update_alone(tx: Any, grads: PyTree, chosen: PyTree) -> PyTree:
    return _update_twice(tx, grads, tx.init(chosen), chosen)[0]


def _make_bind(fn: Callable[..., Any], plan: Layout, args: tuple[Any, ...], notes: list[str]) -> Bind:
    """Return a wrapper that lets `fn`, and other functions that call the same loss, run on one device.

    If the loss names mesh axes (`nn.BatchNorm(axis_name="data")`), the wrapper binds all axes of the mesh with size 1,
    and `notes` gets a line. Otherwise the wrapper changes nothing.
    """
    mesh = plan.mesh
    try:
        jax.eval_shape(fn, *args)
        return lambda fn: fn
    except (NameError, ValueError, RuntimeError) as error:
        if not isinstance(error, NameError) or unbound_axis_name(error) not in mesh.axis_names:
            with users_code(plan):  # adds the remedy to the error
                raise
    notes.append("the loss names mesh axes, so that on one device they were given size 1")
    shape = (1,) * len(mesh.axis_names)
    one = Mesh(mesh.devices.flat[:1].reshape(shape), mesh.axis_names, axis_types=(AxisType.Auto,) * len(shape))
    spec = PartitionSpec()
    return partial(jax.shard_map, mesh=one, in_specs=spec, out_specs=spec, check_vma=False)


def _with_stand_ins(tx: Any, params: PyTree, notes: list[str]) -> optax.GradientTransformation:
    """Return `tx` with placeholders for its extra arguments (`value`, `grad`, `value_fn`).

    The sharded step and the step on one device get the same placeholders. The placeholder for the loss function is the
    sum of squares of the parameters, because the true losses of the two steps differ by rounding.
    """
    tx = take_fast_gradients(tx, params)
    extra = find_extra_args(tx, params)
    if extra.names:
        notes.append(
            f"the optimizer asks for {', '.join(extra.names)}: both sides gave it a sum of squares as the loss"
        )
    return extra.fill_in(tx)


def _record(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap `tx` so that its state records the gradients and the updates.

    The state is a dictionary: "given", the gradients from which `tx` updates, set by the caller; "grads", the gradients
    that the step computed; "updates", the second updates of `tx`; and "inner", the state of `tx`.
    """

    def start(params: PyTree) -> dict[str, PyTree]:
        empty = {name: jax.tree.map(jnp.zeros_like, params) for name in ("given", "grads", "updates")}
        return empty | {"inner": tx.init(params)}

    def update(grads: PyTree, state: dict[str, PyTree], params: PyTree | None = None) -> Any:
        updates, inner = _update_twice(tx, state["given"], state["inner"], params)
        return updates, {"given": state["given"], "grads": grads, "updates": updates, "inner": inner}

    return optax.GradientTransformation(start, update)


def _update_twice(tx: Any, grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    _, state = tx.update(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return updates, state


def _to_f32(what: str, tree: PyTree, notes: list[str]) -> PyTree:
    """Cast floats of lower precision in a tree to f32, and append to `notes` that the arrays `what` were cast."""
    low = dict.fromkeys(str(x.dtype) for x in jax.tree.leaves(tree) if _is_low(x))
    if not low:
        return tree
    notes.append(f"{what} in {', '.join(low)} were cast to float32")
    return jax.tree.map(lambda x: x.astype(np.float32) if _is_low(x) else x, tree)


def _is_low(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize < 4


def _verdict(found: list[Difference]) -> str:
    return "ok" if all(one.ok for one in found) else DIFFERS
