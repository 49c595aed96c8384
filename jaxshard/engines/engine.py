"""`Engine`, the interface of all engines: how to compute the gradient of a loss, and with which collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxshard.adapt.objective import Objective
from jaxshard.adapt.remat import RematPolicy, policy_function
from jaxshard.adapt.units import Units
from jaxshard.core.collectives import NATIVE, Sums
from jaxshard.core.compat import KEEP_REPEATED_GATHERS
from jaxshard.core.layout import Layout
from jaxshard.core.loss import Max, Mean, Sum
from jaxshard.core.types import PyTree
from jaxshard.core.wire import Format
from jaxshard.engines.compiler_options import (
    Options,
    check_options,
    describe_options,
    merge_options,
    overlap_options,
)
from jaxshard.engines.just_in_time import Call, MakeMove, make_call

Scatter = Literal["each", "end"]
Precision = Literal["bf16", "bfloat16"]
Reduction = Literal["native", "ordered"]


class Outcome(NamedTuple):
    """The results of a loss besides the gradient.

    Attributes:
      value: the global loss, a scalar.
      metrics: the loss's metrics, by name.
      state: the model's new state.
      residuals: rounding errors of the gradients, for `js.wire` with feedback to add in the next step; else ().
    """

    value: jax.Array
    metrics: dict[str, Mean | Sum | Max]
    state: PyTree
    residuals: PyTree = ()


ValueAndGrad = Callable[..., tuple[Outcome, PyTree]]
"""`fn(stored parameters, state, batch, key) -> (Outcome, gradients as stored)` of global arrays, under jit. An engine
that places residuals (`Engine.residuals`) receives the residuals of the previous step as a fifth argument."""


class BlockPasses(NamedTuple):
    """Upper bounds of how often a pipelined step gathers the blocks' weights and reduces their gradients.

    The numbers are per device and step, for each parameter of the blocks. Every gather or reduction is of a single
    block. They are bounds, because conditionals decide at run time which operations run.

    Attributes:
      gathers: the number of times that a block's weights are gathered.
      reductions: the number of times that a block's gradient is reduced.
    """

    gathers: int
    reductions: int


QUANT = "quant"
"""The value of `gather_dtype` that gathers weights in the 8 bits to which the model rounds them."""


@dataclass(frozen=True)
class Engine:
    """The base class of all engines, which compute the loss and gradient of a step.

    The step, the checks and the planner use only the methods below, and never test which engine it is.

    Args:
      microbatches: the number of micro-batches, which are computed one after another and whose gradients are added.
      scatter: reduce the gradient of each micro-batch ("each", least memory) or their sum once ("end", least traffic).
      compute_dtype: the dtype to which floating weights are cast before they are gathered; None leaves them.
      reduce_dtype: the dtype in which gradients are reduced, or the format of `js.wire` in which they are sent; None
        takes the parameter's dtype.
      gather_dtype: the dtype or format of `js.wire` in which weights are gathered; None takes the dtype of computation.
      options: the user's compiler options, which override those for the chips of the mesh (`compiler_options.py`); the
        value None removes one.
    """

    microbatches: int = 1
    scatter: Scatter = "each"
    compute_dtype: Any = None
    reduce_dtype: Any = None
    gather_dtype: Any = field(default=None, kw_only=True)
    # Keyword-only, so that subclasses can add positional fields; not hashed, since a dict has no hash.
    options: Options = field(default_factory=dict, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, Integral) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise ValueError(f"microbatches must be a whole number from 1 on, got {self.microbatches!r}")
        object.__setattr__(self, "microbatches", int(self.microbatches))
        if self.scatter not in ("each", "end"):
            raise ValueError(f"scatter must be 'each' or 'end', got {self.scatter!r}")
        _check_dtype("compute_dtype", self.compute_dtype)
        for name in ("reduce_dtype", "gather_dtype"):
            _check_sent(name, getattr(self, name))
        if self.compiler_chooses and (isinstance(self.reduce_dtype, Format) or self.gather_dtype is not None):
            name = "reduce_dtype" if isinstance(self.reduce_dtype, Format) else "gather_dtype"
            raise ValueError(
                f"{name}: under js.{self.name} the compiler chooses the collectives, and it has none for encoded "
                f"arrays; use js.explicit({name}=...)"
            )
        if self.gathers_rounded and self.name != "explicit":
            raise ValueError(
                f"gather_dtype={QUANT!r} rounds weights once a step, which js.{self.name} does not; use js.explicit"
            )
        if isinstance(self.gather_dtype, Format) and self.gather_dtype.feedback:
            raise ValueError(
                "gather_dtype: feedback is for gradients, whose errors add up over steps; a weight is rounded anew "
                "from what is stored each time. Leave it out, or give it to reduce_dtype"
            )
        object.__setattr__(self, "options", check_options(self.options))

    def __str__(self) -> str:
        """Return the engine's settings, and the compiler options of a step on each kind of chip."""
        return "\n".join([repr(self), "compiler options:", *describe_options(self.options)])

    def value_and_grad(self, objective: Objective, layout: Layout) -> ValueAndGrad:
        """Make the function that computes the loss `objective` and its gradient, with the signature `ValueAndGrad`."""
        raise NotImplementedError(f"{type(self).__name__} has no value_and_grad")

    @property
    def shows_whole_batch(self) -> bool:
        """True if the loss sees the global batch at once.

        Then the engine need not know which arrays of the batch have rows, because it never splits a batch into parts.
        """
        return False

    @property
    def compiler_chooses(self) -> bool:
        """True if the compiler inserts the collectives; False if the engine issues exactly those of the layout."""
        return False

    def make_call(self, objective: Objective, layout: Layout, make_move: MakeMove) -> Call:
        """Make the function that gathers the weights, as this engine does it, and computes the loss.

        A pipelined engine need not implement it, since a schedule runs its blocks.

        Args:
          objective: the loss.
          layout: the layout.
          make_move: makes, for each parameter, the functions that gather its weight and reduce its gradient. The engine
            itself passes functions that issue collectives; the audit of collectives passes functions that only count.
        """
        raise NotImplementedError(f"{type(self).__name__} has no make_call")

    def state_rules(self, objective: Objective, layout: Layout, batch: PyTree) -> Any:
        """Return the `StateRules` that combine the model states of all devices and micro-batches into one new state.

        A model's state is, for example, the statistics of BatchNorm. Return None if the loss sees the global batch at
        once, or if the engine supports no model with a state.
        """
        return None

    def manual_axes(self, layout: Layout) -> frozenset[str]:
        """Return the mesh axes over which the loss runs once per device, on that device's rows, in a `shard_map`."""
        raise NotImplementedError(f"{type(self).__name__} has no manual_axes")

    def row_axes(self, layout: Layout) -> tuple[str, ...]:
        """Return the mesh axes over which the loss and the gradients of parameters outside the blocks are summed.

        They are the axes that split rows or sequence positions, and the axis of a pipeline, whose devices compute
        embedding and head for different micro-batches.
        """
        return layout.sum_axes

    def sums(self, layout: Layout) -> Sums:
        """Return the functions that sum over devices, in the order that the hardware chooses or in a fixed order."""
        return NATIVE

    def residuals(self, layout: Layout) -> PyTree:
        """Return the placements of the gradients' rounding errors, which the training state carries to the next step.

        The result is a tree like the parameters, with None for frozen parameters; () for an engine without `feedback`.
        """
        return ()

    def block_passes(self, layout: Layout) -> BlockPasses | None:
        """Return upper bounds of how often a schedule gathers and reduces the blocks' weights in a step.

        Return None for an engine without a schedule, because there a trace of the loss shows the exact numbers.
        """
        return None

    def compiler_options(self, mesh: Mesh, params: PyTree = ()) -> dict[str, Any] | None:
        """Return the compiler options of a step: options for the chip, options that the engine needs, and the user's.

        Pass the result to `jax.jit(compiler_options=...)`, also if a step runs inside a user's jitted function.

        Args:
          mesh: the mesh of the step.
          params: the parameters, or their shapes; the options for some chips depend on their dtypes.
        """
        stored_bytes = any(x.dtype.itemsize == 1 for x in jax.tree.leaves(params))
        sent_bytes = isinstance(self.gather_dtype, Format) or self.gathers_rounded
        overlap = overlap_options(mesh, with_bytes=stored_bytes or sent_bytes)
        return merge_options(overlap, self.needed_options(mesh), self.options) or None

    def needed_options(self, mesh: Mesh) -> Options:
        """Return the options without which the compiler would undo the engine's work; {} if it needs none."""
        return {}

    @property
    def gathers_rounded(self) -> bool:
        """True if weights that the model rounds to 8 bits are gathered in these 8 bits."""
        return _is_quant(self.gather_dtype)

    @property
    def feedback(self) -> bool:
        """True if each step adds the rounding errors of the last step's gradients (`js.wire` with feedback=True)."""
        return isinstance(self.reduce_dtype, Format) and self.reduce_dtype.feedback

    @property
    def reduced_dtype(self) -> jnp.dtype | None:
        """The dtype that holds the gradient of one use of a weight exactly, if it is reduced at once in a dtype."""
        native = self.scatter == "each" and self.reduce_dtype is not None and not isinstance(self.reduce_dtype, Format)
        return jnp.dtype(self.reduce_dtype) if native else None

    @property
    def name(self) -> str:
        """The name of the function that makes the engine, such as "explicit"."""
        return type(self).__name__.lower()

    def describe(self) -> dict[str, Any]:
        """Return the engine's name and settings in a dict, for commands to print or write as JSON."""
        dtypes = {name: getattr(self, name) for name in ("compute_dtype", "reduce_dtype", "gather_dtype")}
        names = {
            name: dtype.name if isinstance(dtype, Format) else dtype if _is_quant(dtype) else jnp.dtype(dtype).name
            for name, dtype in dtypes.items()
            if dtype is not None
        }
        return {"engine": self.name, "microbatches": self.microbatches} | names


@dataclass(frozen=True)
class WholeModelEngine(Engine):
    """An engine in which every device runs the full model, on weights that are gathered just in time.

    Args:
      remat: the activations that the forward pass of a block or unit saves: "nothing", "dots", "everything", a
        checkpoint policy, or {name of an activation: what to do with it}; None takes the model's own choice, which is
        "everything" for most models.
      units: classes of modules of `js.linen` or `js.nnx`, such as [Block]. Each module of these classes gathers its
        parameters just before it runs.
    """

    remat: RematPolicy | None = None
    units: Sequence[type] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remat is not None:
            policy_function(self.remat)
        object.__setattr__(self, "units", _check_units(self.units))

    def make_call(self, objective: Objective, layout: Layout, make_move: MakeMove) -> Call:
        """Make the function that computes the loss on weights gathered just in time; see `Engine.make_call`."""
        return make_call(objective, layout, make_move, self.remat, tuple(self.units))

    def needed_options(self, mesh: Mesh) -> Options:
        """Return the option that stops the CPU compiler from merging a unit's gathers in forward and backward pass."""
        # The CPU compiler of JAX 0.10 drops the barrier before a unit's gather in the backward pass, and merges it with
        # the gather of the forward pass.
        cpu = mesh.devices.flat[0].platform == "cpu"
        return KEEP_REPEATED_GATHERS if self.units and cpu else {}

    def describe(self) -> dict[str, Any]:
        """Return the engine's name and settings in a dict, for commands to print or write as JSON."""
        return super().describe() | {"remat": self.remat, "reduction": "native"}


def _check_units(units: Any) -> Units:
    if not isinstance(units, (list, tuple)) or not all(isinstance(unit, type) for unit in units):
        got = f"the class {units.__name__} alone" if isinstance(units, type) else repr(units)
        raise TypeError(f"units must be a list of classes of modules such as [Block], got {got}")
    return tuple(units)


def _is_quant(dtype: Any) -> bool:
    return isinstance(dtype, str) and dtype == QUANT


def _check_sent(name: str, sent: Any) -> None:
    if isinstance(sent, type) and issubclass(sent, Format):
        raise TypeError(f"{name} must be a format, not its class: write {sent.__name__}()")
    if name == "gather_dtype" and _is_quant(sent):
        return
    if not isinstance(sent, Format):
        _check_dtype(name, sent)
    elif type(sent).__hash__ is None:
        raise TypeError(
            f"{name}: a format of js.wire is a part of the compiled program and must be hashable; write "
            f"@dataclass(frozen=True) before class {type(sent).__name__}"
        )


def _check_dtype(name: str, dtype: Any) -> None:
    try:
        floating = dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        wire = "" if name == "compute_dtype" else ", or a js.wire.Format such as js.wire.int8()"
        raise TypeError(f"{name} must be a floating dtype such as jnp.bfloat16{wire}, got {dtype!r}")


def precision_dtypes(precision: Precision | None, compute_dtype: Any, reduce_dtype: Any) -> tuple[Any, Any]:
    """Return an engine's (compute_dtype, reduce_dtype), given its argument `precision` and the two dtype arguments.

    Args:
      precision: "bf16", or "bfloat16", computes and reduces gradients in bfloat16; None keeps both dtype arguments.
      compute_dtype: the engine's argument; must be None or agree with the precision.
      reduce_dtype: the engine's argument, which overrides the precision.

    Raises:
      ValueError: an unknown precision, or a `compute_dtype` that contradicts it.
    """
    if precision is None:
        return compute_dtype, reduce_dtype
    if precision not in ("bf16", "bfloat16"):
        raise ValueError(f"precision must be 'bf16' or None, which leaves parameters in their dtype, got {precision!r}")
    _check_dtype("compute_dtype", compute_dtype)
    if compute_dtype is not None and jnp.dtype(compute_dtype) != jnp.bfloat16:
        raise ValueError(
            f"precision='bf16' computes in bfloat16, but got compute_dtype={jnp.dtype(compute_dtype).name} as well; "
            "leave one of them out (reduce_dtype may be any)"
        )
    return jnp.bfloat16, jnp.bfloat16 if reduce_dtype is None else reduce_dtype


def check_engine(engine: Any) -> None:
    """Raise TypeError unless the argument is an engine, such as the result of `js.auto()`."""
    if isinstance(engine, Engine):
        return
    got, name = type(engine).__name__, getattr(engine, "__name__", "")
    if name in ("auto", "explicit", "pipelined"):
        arguments = "microbatches=8" if name == "pipelined" else ""
        got = f"the function that makes one: write js.{name}({arguments})"
    raise TypeError(f"engine must be js.auto(...), js.explicit(...) or js.pipelined(...), got {got}")
