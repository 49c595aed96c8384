"""`repair`: for each surprise of an audit the edit that removes it, found by trying edits with the compiler."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh

from jaxshard.checks.collectives.compare import Comparison
from jaxshard.checks.parity import Parity
from jaxshard.core.layout import human_bytes
from jaxshard.core.strategy import Strategy
from jaxshard.core.types import InitFn, LossFn, PyTree
from jaxshard.engines.auto import auto
from jaxshard.engines.engine import Engine
from jaxshard.plan.repair.edits import Edit
from jaxshard.plan.repair.parts import Parts, Traced
from jaxshard.plan.repair.propose import propose
from jaxshard.plan.repair.result import Change, Repair, Repairs, Tried, moved_bytes, unexpected_bytes, without

TRIES = 48
_REFUSALS = (ValueError, TypeError, NameError, LookupError, ArithmeticError, RuntimeError)
"""Errors of layouts, of the compiler, and of the user's own code where another engine gives it other shapes."""


def repair(
    init_fn: InitFn,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    strategy: Strategy,
    mesh: Mesh,
    batch: PyTree,
    *,
    engine: Engine | None = None,
    trainable: PyTree | Callable[[str], bool] | None = None,
    tries: int = TRIES,
) -> Repairs:
    """Find the edits that remove the surprises of a step's audit.

    The arguments are those of `js.parity`. Edits are derived from what each surprise moves and from its source line
    (see `plan/repair/propose.py`), applied to the traced loss, the strategy or the engine without touching a file, and
    tried by compiling. One is kept if fewer bytes move unexpectedly, nothing moves unexpectedly that did not before,
    and `js.parity` passes with it. One that leaves surprises, or keeps a weight whole, must also move fewer bytes in
    all.

    Nothing is run but parity, which needs a batch with values and a mesh of this process's devices. Without them only
    edits are kept that say where arrays live and so can't change a value.

    Args:
      init_fn: `init_fn(key) -> parameters | js.Model(params, state)`.
      loss_fn: `loss_fn(model, batch, key)`.
      tx: an optax transform.
      strategy: the strategy, as `js.layout` takes it.
      mesh: the mesh.
      batch: a global batch, of arrays or of `jax.ShapeDtypeStruct`.
      engine: the engine; `js.auto()` by default.
      trainable: which parameters are trained, as `js.layout` takes it.
      tries: the most edits that are compiled.

    Returns:
      The edits, what was tried in vain, and the audits before and after; `print` it.

    Example:
      repairs = js.plan.repair(init_fn, loss_fn, tx, strategy, mesh, batch, engine=js.explicit())
      print(repairs)
    """
    if tries < 1:
        raise ValueError(f"repair: tries must be at least 1 compilation, got {tries}")
    parts = Parts(init_fn, loss_fn, tx, strategy, mesh, batch, engine or auto(), trainable)
    before, traced = parts.audit()
    search = _Search(tries, _can_run(parts))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rules and layouts that are only tried
        edits, last = search.run(_Trial(parts, before, traced))
    return Repairs(before, last.comparison, tuple(edits), tuple(search.tried), last.parts)


class _Trial(NamedTuple):
    """Parts, their audit, what they were traced to, and the edit that made them."""

    parts: Parts
    comparison: Comparison
    traced: Traced
    edit: Edit | None = None


class _Failed(enum.Enum):
    """The outcome of a comparison with one device that an edit does not pass."""

    FAILED = enum.auto()


_FAILED = _Failed.FAILED


class _Search:
    """The search for edits.

    Attributes:
      tries: compilations that are left.
      tried: the edits that did not help.
    """

    def __init__(self, tries: int, compares: bool):
        self.tries = tries
        self.tried: list[Tried] = []
        self._compares = compares
        self._failed: set[Edit] = set()

    def run(self, start: _Trial) -> tuple[list[Repair], _Trial]:
        """Take one edit after the other, as long as surprises are left and one helps."""
        made: list[Repair] = []
        now = start
        while not now.comparison.ok and (step := self._improve(now)) is not None:
            one, now = step
            made.append(one)
        return made, now

    def _improve(self, now: _Trial) -> tuple[Repair, _Trial] | None:
        layout = now.parts.layout
        measured: dict[Edit, int] = {}
        partly: list[_Trial] = []
        for group in propose(now.parts, layout, now.comparison, now.traced, measured):
            wholly: list[_Trial] = []
            for edit in group.edits:
                trial = self._try(edit, now, measured, group.has_to_save)
                if trial is not None:
                    (wholly if trial.comparison.ok else partly).append(trial)
                if wholly and not group.try_all:
                    break
            chosen = self._best(wholly, now) or (self._best(partly, now) if group.at_once else None)
            if chosen is not None:
                return chosen
        return self._best(partly, now)

    def _best(self, trials: list[_Trial], now: _Trial) -> tuple[Repair, _Trial] | None:
        """Take the edit that leaves least unexpected, of these the one that moves least, if the result stays."""
        for trial in sorted(trials, key=lambda one: (unexpected_bytes(one.comparison), moved_bytes(one.comparison))):
            assert trial.edit is not None, "every trial but the first has an edit"
            if trial.edit not in self._failed and (parity := self._compare(trial.edit, trial)) is not _FAILED:
                return _describe(trial.edit, now, trial, parity), trial
        return None

    def _try(self, edit: Edit, now: _Trial, measured: dict[Edit, int], has_to_save: bool) -> _Trial | None:
        """Compile with an edit, and note its unexpected bytes; None if it does not help."""
        if self.tries == 0 or edit in self._failed:
            return None
        if not edit.keeps_values and not self._compares:
            self._note(
                edit,
                "not tried: only a run on a batch with values, on devices of this process, could tell whether the "
                "result stays; repair the step on simulated devices, or compare it with js.parity",
            )
            return None
        self.tries -= 1
        try:
            parts = edit.apply(now.parts)
            trial = _Trial(parts, *parts.audit(), edit)
        except _REFUSALS as error:
            self._note(edit, f"refused: {_first_line(error)}")
            return None
        measured[edit] = unexpected_bytes(trial.comparison)
        if why := why_worse(now.comparison, trial.comparison, has_to_save):
            self._note(edit, why)
            return None
        return trial

    def _compare(self, edit: Edit, trial: _Trial) -> Parity | _Failed | None:
        """Compare an edited step with one device; None where that can't be, and the edit keeps values anyway."""
        if not self._compares:
            return None
        try:
            report = trial.parts.parity()
        except _REFUSALS as error:
            if edit.keeps_values:
                return None
            self._note(edit, f"can't be compared with one device: {_first_line(error)}")
            return _FAILED
        if not report.ok:
            self._note(edit, f"the result is another: {report.headline}")
            return _FAILED
        return report

    def _note(self, edit: Edit, why: str) -> None:
        self._failed.add(edit)
        self.tried.append(Tried(edit, why))


def why_worse(before: Comparison, after: Comparison, has_to_save: bool) -> str:
    """Return why an edit does not help; "" if it does.

    Where no surprise is left, what moves is what was promised. That may be more than before: devices that all compute
    the same sum no gradients.
    """
    old, new = unexpected_bytes(before), unexpected_bytes(after)
    if new >= old:
        return f"unexpected: {Change(old, new)}"
    if added := without(after.surprises, before.surprises):
        one = added[0].found
        return f"moves something else: {one.kind} over {'+'.join(one.axes)}, {human_bytes(one.bytes or 0)}"
    old, new = moved_bytes(before), moved_bytes(after)
    return f"moves more in all: {Change(old, new)}" if new >= old and (has_to_save or not after.ok) else ""


def _describe(edit: Edit, now: _Trial, trial: _Trial, parity: Parity | None) -> Repair:
    gone = without(now.comparison.surprises, trial.comparison.surprises)
    return Repair(
        edit,
        gone,
        Change(unexpected_bytes(now.comparison), unexpected_bytes(trial.comparison)),
        Change(moved_bytes(now.comparison), moved_bytes(trial.comparison)),
        Change(_resting(now.parts), _resting(trial.parts)),
        parity,
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _resting(parts: Parts) -> int:
    return sum(parts.layout.bytes_per_device().values())


def _can_run(parts: Parts) -> bool:
    """Return True if the batch has values, and the mesh is of devices of this process that exist."""
    local = set(map(id, jax.local_devices()))
    has_values = all(not isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(parts.batch))
    return has_values and all(id(device) in local for device in parts.mesh.devices.flat)
