"""Edits: what to change in a training step, as values that are shown as code and applied without touching a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, Protocol

from jaxshard.core.constrain import Activations
from jaxshard.core.rules import RULES, Rule, Rules
from jaxshard.core.strategy import compose
from jaxshard.core.strategy_parts import Batch, Tensor, parts_of
from jaxshard.engines.engine import Engine
from jaxshard.plan.repair.parts import MakeChange, Parts
from jaxshard.plan.repair.rewrite import Change, Site, leave_out

Names = tuple[str | None, ...]


class Edit(Protocol):
    """A change of a training step, a value: equal edits are the same one.

    Attributes:
      keeps_values: True if it can't change what a step computes, whatever the model: it only says where arrays live.
    """

    keeps_values: ClassVar[bool]

    @property
    def place(self) -> str:
        """The line to change, as `file:line`, or the part of the step: "the strategy", "the engine"."""

    @property
    def what(self) -> str:
        """The change in words."""

    @property
    def code(self) -> str:
        """The code to write there; "" where something is to be taken out."""

    def apply(self, parts: Parts) -> Parts:
        """Return the parts with this edit made; it may raise the errors of `js.layout`, which refuses some."""


def edit_str(edit: Edit) -> str:
    """Write an edit on one line: where, what, and the code."""
    return f"{edit.place}: {edit.what}" + (f": {edit.code}" if edit.code else "")


@dataclass(frozen=True)
class ConstrainResult:
    """Wrap the result of an operation of the loss in `js.constrain`.

    Attributes:
      sites: the operation, each time that its line runs.
      number: which of its results.
      names: the names of the result's dimensions.
      array: the result in words, such as "float32[4, 8, 96]".
    """

    sites: tuple[Site, ...]
    number: int
    names: Names
    array: str
    keeps_values: ClassVar[bool] = True

    @property
    def place(self) -> str:
        """The line of the operation."""
        return self.sites[0].line

    @property
    def what(self) -> str:
        """The change in words: the result to wrap."""
        return f"wrap the result {self.array} of {self.sites[0].primitive}"

    @property
    def code(self) -> str:
        """The call around the result."""
        return f"js.constrain(..., {self.names})"

    def apply(self, parts: Parts) -> Parts:
        """Return the parts with the constraint."""
        return replace(
            parts, loss_changes=_with(parts.loss_changes, self.sites, partial(_wrap, self.number, self.names))
        )


@dataclass(frozen=True)
class ChangeConstraint:
    """Take a constraint of the user's out of the loss or the optimizer, or put another one in its place.

    Attributes:
      sites: the constraint, for each array that its line constrains.
      names: the names for `js.constrain` in its place; None takes it out.
      where: "loss" or "tx".
    """

    sites: tuple[Site, ...]
    names: Names | None
    where: Literal["loss", "tx"]
    keeps_values: ClassVar[bool] = True

    @property
    def place(self) -> str:
        """The line of the constraint."""
        return self.sites[0].line

    @property
    def what(self) -> str:
        """The change in words."""
        return "take the constraint out" if self.names is None else "in place of the constraint"

    @property
    def code(self) -> str:
        """The constraint in its place; "" for none."""
        return "" if self.names is None else f"js.constrain(..., {self.names})"

    def apply(self, parts: Parts) -> Parts:
        """Return the parts without the constraint, or with the other one."""
        change: MakeChange = _leave_out if self.names is None else partial(_wrap_operand, self.names)
        if self.where == "tx":
            return replace(parts, tx_changes=_with(parts.tx_changes, self.sites, change))
        return replace(parts, loss_changes=_with(parts.loss_changes, self.sites, change))


@dataclass(frozen=True)
class LeaveOutSort:
    """Take a sort out of the loss whose order nothing depends on.

    Attributes:
      sites: the sort, each time that its line runs.
    """

    sites: tuple[Site, ...]
    keeps_values: ClassVar[bool] = True

    @property
    def place(self) -> str:
        """The line of the sort."""
        return self.sites[0].line

    @property
    def what(self) -> str:
        """The change in words, and why the sort may go."""
        return "take the sort out, for all that is made of its result is summed or compared over it"

    @property
    def code(self) -> str:
        """Nothing: the sort is taken out."""
        return ""

    def apply(self, parts: Parts) -> Parts:
        """Return the parts without the sort."""
        return replace(parts, loss_changes=_with(parts.loss_changes, self.sites, _leave_out))


@dataclass(frozen=True)
class SetRows:
    """Other axes for the rows of a batch.

    Attributes:
      now: the axes of a `js.batch` of the strategy.
      axes: those in their place.
    """

    now: tuple[str, ...]
    axes: tuple[str, ...]
    keeps_values: ClassVar[bool] = True

    @property
    def place(self) -> str:
        """The strategy."""
        return "the strategy"

    @property
    def what(self) -> str:
        """Which axis is taken away from the rows."""
        gone = [axis for axis in self.now if axis not in self.axes]
        return f"split no rows over {', '.join(map(repr, gone))}, which splits weights"

    @property
    def code(self) -> str:
        """The part of the strategy with the axes that are left."""
        return f"js.batch({', '.join(map(repr, self.axes))})"

    def apply(self, parts: Parts) -> Parts:
        """Return the parts with rows split over the axes that are left."""
        changed = [
            Batch(self.axes) if isinstance(one, Batch) and one.axes == self.now else one
            for one in parts_of(parts.strategy)
        ]
        return replace(parts, strategy=compose(*changed))


@dataclass(frozen=True)
class SetRules:
    """Other rules for a `js.tensor` of the strategy.

    Attributes:
      axis: of that `js.tensor`.
      rules: all of its rules.
      reason: what is changed about them, in words.
    """

    axis: Any
    rules: tuple[Rule, ...]
    reason: str
    keeps_values: ClassVar[bool] = True

    @property
    def place(self) -> str:
        """The strategy."""
        return "the strategy"

    @property
    def what(self) -> str:
        """The change in words."""
        return self.reason

    @property
    def code(self) -> str:
        """The call with its rules, the built-in ones in short."""
        own = self.rules[: -len(RULES)] if self.rules[-len(RULES) :] == RULES else None
        shown = "" if own == () else repr(list(self.rules)) if own is None else _with_built_in(own)
        axis = "" if self.axis == "tensor" else f"axis={self.axis!r}"
        return f"js.tensor({', '.join(filter(None, (shown, axis)))})"

    def apply(self, parts: Parts) -> Parts:
        """Return the parts with a strategy that has these rules."""
        changed = [
            Tensor(Rules(self.rules), one.axis) if isinstance(one, Tensor) and one.axis == self.axis else one
            for one in parts_of(parts.strategy)
        ]
        return replace(parts, strategy=compose(*changed))


@dataclass(frozen=True)
class SetEngine:
    """Another engine."""

    engine: Engine
    keeps_values: ClassVar[bool] = (
        False  # a loss that looks at several rows at once is another one where each device has its own
    )

    @property
    def place(self) -> str:
        """The engine."""
        return "the engine"

    @property
    def what(self) -> str:
        """The change in words."""
        return "compute each device's rows by themselves" if not self.engine.compiler_chooses else "one global program"

    @property
    def code(self) -> str:
        """The argument of `js.make_step`."""
        given = [f"{f.name}={getattr(self.engine, f.name)!r}" for f in fields(self.engine) if not _is_default(self, f)]
        return f"engine=js.{self.engine.name}({', '.join(given)})"

    def apply(self, parts: Parts) -> Parts:
        """Return the parts with this engine, and the loss as it was written."""
        return replace(parts, engine=self.engine, loss_changes={})


def _is_default(edit: SetEngine, field: Any) -> bool:
    return bool(getattr(edit.engine, field.name) == getattr(type(edit.engine)(), field.name))


def _with_built_in(own: tuple[Rule, ...]) -> str:
    return f"[{', '.join(map(repr, own))}, *js.RULES]"


def _with(changes: Mapping[Site, MakeChange], sites: Sequence[Site], change: MakeChange) -> Mapping[Site, MakeChange]:
    return {**changes, **dict.fromkeys(sites, change)}


def _wrap(number: int, names: Names, activations: Activations | None) -> Change:
    assert activations is not None, "only activations of the loss have names"

    def change(operands: list[Any], run: Callable[[], list[Any]]) -> list[Any]:
        results = run()
        wrapped = activations.constrain(results[number], names, names)
        return [*results[:number], wrapped, *results[number + 1 :]]

    return change


def _wrap_operand(names: Names, activations: Activations | None) -> Change:
    assert activations is not None, "only activations of the loss have names"
    return lambda operands, run: [activations.constrain(operands[0], names, names)]


def _leave_out(activations: Activations | None) -> Change:
    return leave_out
