"""The matrix products that each device computes in a step, from its traced program, what is computed again included.

A traced step has `shard_map`s, in which shapes are those of one device along the manual axes, scans over blocks, and in
the backward pass the blocks' forward pass once more. So the FLOPs here are those of the hardware, not of the model:

    dot_general [24576, 4096] x [4096, 14336] in a scan of 32 blocks     32 times 2 * 24576 * 4096 * 14336 FLOPs

A TPU's matrix unit multiplies tiles of 128 or 256 rows and columns: of a product of which the contracted or an output
dimension is smaller, such as the 128 of an attention head on a v6e, a part of the unit is idle
(jax-ml.github.io/scaling-book/tpus).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import Mesh

from jaxshard.core.compat import contracted_kernel_dims, equation_frames, newly_manual_axes, scan_counts
from jaxshard.core.jaxpr import CALLS, open_jaxpr, read_equations
from jaxshard.core.our_code import is_jaxshard_file
from jaxshard.cost.hardware import Chip
from jaxshard.layers.attention.attention import SCOPE
from jaxshard.plan.time.pipeline import Ticks

Range = tuple[float, float]
Parts = Callable[[Any, frozenset[str]], int]
"""`parts(equation, automatic axes) -> n`: among how many devices the compiler splits an equation's work."""

_LIBRARIES = {"jax", "flax", "optax"}

TRAFFIC: Range = (2.1, 4.1)
"""How often the operands and results of a product go through the memory, beside its multiplications.

Once each for the product itself; the rest stands for what is done to them between two products (norms, gates,
rotations, casts, copies), which is proportional to them. The middle, 3.1, is the one number that is calibrated: on the
published step times of Llama 3.1 8B on 8 chips of v6e and of AXLearn's 7B on 1,024 of v5e, by least squares of the two
relative errors (`benchmarks/step_times.py --calibrate`). The range, a third to both sides, is assumed.
"""


@dataclass(frozen=True)
class ProductCost:
    """Equal products of a step, on one device.

    Attributes:
      where: the user's line that asks for it, such as "llama.py:236", or the kernel's name.
      shapes: of the operands, such as "[24576, 4096] x [4096, 14336]".
      dtype: of the wider operand.
      count: how often it runs in a step.
      flops: of all of them, two for every multiply-add.
      bytes: of operands and results of all of them, through the memory once each.
      compute: seconds in which the matrix unit is busy with all of them; 0 on an unknown chip.
      seconds: of all of them, at best and at worst, with what the memory moves for them; (0, 0) on an unknown chip.

    Example:
        longest = js.plan.predict(layout, loss_fn, batch, tx=tx, estimate=True).products[0]
        longest.where, longest.shapes, longest.flops
    """

    where: str
    shapes: str
    dtype: str
    count: int
    flops: float
    bytes: float
    compute: float
    seconds: Range


class _Product(NamedTuple):
    """One equation: rows x contracted x columns, over a batch; `times` of it in a step, on one device."""

    where: str
    shapes: str
    dtype: str
    passes: int
    times: float
    flops: float
    bytes: float
    fill: Callable[[int], float]


def product_costs(
    closed_jaxpr: Any,
    mesh: Mesh,
    chip: Chip | None = None,
    *,
    parts: Parts | None = None,
    ticks: Ticks | None = None,
) -> tuple[ProductCost, ...]:
    """Return the products of a traced program on each device of a mesh, those that take longest first.

    Args:
      closed_jaxpr: of the step, such as `jitted.trace(...).jaxpr`.
      mesh: its devices.
      chip: one of them, or None, which leaves out the times.
      parts: among how many devices the compiler splits an equation along the axes that are left to it; by default all
        of them.
      ticks: of a pipeline's program (`ticks_of`): how often the conditionals of its loop run. Every other conditional
        counts with its most expensive branch.

    Returns:
      One for all equal products of one line. A `while` loop counts once, because nobody knows how often it runs, but
      for the exchange of tokens in windows, which runs as often as an even routing needs.

    Example:
        products = product_costs(jax.jit(loss_fn).trace(params, batch, key).jaxpr, mesh)
        sum(one.count * one.flops for one in products)
    """
    jaxpr, known = _open(closed_jaxpr, {}, ())
    automatic = frozenset(mesh.axis_names)
    every = parts or (lambda _, axes: math.prod(mesh.shape[axis] for axis in axes))
    walk = _Walk(mesh, every, mesh.devices.flat[0].platform == "gpu", ticks)
    found: dict[tuple[str, str, str, int], list[_Product]] = {}
    for one in walk.products(jaxpr, 1, automatic, known):
        if isinstance(one, _Product):
            found.setdefault((one.where, one.shapes, one.dtype, one.passes), []).append(one)
    costs = [_cost(ones, chip) for ones in found.values()]
    return tuple(sorted(costs, key=lambda one: (-one.seconds[1], -one.flops)))


def compute_seconds(chip: Chip, flops: float, dtype: str, *, passes: int = 1, fill: float = 1.0) -> float:
    """Return how long a chip's matrix unit is busy with a product, at the rate that large products reach.

    Args:
      chip: that computes it.
      flops: of it.
      dtype: of the wider operand.
      passes: as for `Chip.rate`.
      fill: the share of the matrix unit that its dimensions fill.
    """
    return flops / (chip.rate(dtype, passes) * chip.reached * fill)


class Exchange(NamedTuple):
    """A permute or all-to-all that the program itself calls for, `times` in a step, of so many bytes on each device."""

    kind: str
    axes: tuple[str, ...]
    size: int
    times: float
    flops: float = 0.0


_EXCHANGES = {
    "ppermute": "collective-permute",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
}


def exchanges(closed_jaxpr: Any, mesh: Mesh, ticks: Ticks | None = None) -> Iterator[Exchange]:
    """Yield the permutes and all-to-alls of a traced program, as a device sees them; arguments as `product_costs`."""
    walk = _Walk(mesh, lambda _, axes: 1, False, ticks)
    jaxpr, known = _open(closed_jaxpr, {}, ())
    for one in walk.products(jaxpr, 1, frozenset(mesh.axis_names), known):
        if isinstance(one, Exchange):
            yield one


class _Walk(NamedTuple):
    """How a program is read.

    Attributes:
      mesh: its devices.
      parts: see `product_costs`.
      ticks: see `product_costs`.
      fused: True if attention is one kernel, whose logits never leave the chip, although the program shows their
        products: what is traced for GPUs that are not here.
      inside: True inside such a kernel.
    """

    mesh: Mesh
    parts: Parts
    fused: bool
    ticks: Ticks | None = None
    inside: bool = False

    def products(
        self, jaxpr: Any, times: float, automatic: frozenset[str], known: Mapping[Any, Any]
    ) -> Iterator[_Product | Exchange]:
        """Yield products and exchanges of a program that runs so many `times`, with the axes left to the compiler."""
        for equation in read_equations(jaxpr):
            yield from self.of_equation(equation, times, automatic, known)

    def of_equation(
        self, equation: Any, times: float, automatic: frozenset[str], known: Mapping[Any, Any]
    ) -> Iterator[_Product | Exchange]:
        params = equation.params
        if self.fused and not self.inside and SCOPE in str(equation.source_info.name_stack):
            yield from self._replace(inside=True).of_equation(equation, times, automatic, known)
            return
        match equation.primitive.name:
            case "dot_general":
                (left, right), (batch, _) = params["dimension_numbers"]
                yield self._dot(equation, times, automatic, left, right, batch)
            case "ragged_dot_general":
                numbers = params["ragged_dot_dimension_numbers"]
                (left, right), (batch, _) = numbers.dot_dimension_numbers
                # Where the rows of all groups are contracted, each group's result is of its own rows alone.
                groups = equation.outvars[0].aval.shape[0] if set(numbers.lhs_ragged_dimensions) & set(left) else 1
                yield self._dot(equation, times / groups, automatic, left, right, batch)
            case "conv_general_dilated":
                yield self._dot(equation, times, automatic, (), contracted_kernel_dims(params), ())
            case "pallas_call":
                yield from self._kernel(equation, times, automatic, known)
            case "dot_product_attention_fwd_wrapper" | "dot_product_attention_bwd_wrapper":
                yield self._cudnn(equation, times, automatic)
            case "scan":
                count = scan_counts(params)[0]
                inner, passed = _open(params["jaxpr"], known, equation.invars[:count])
                yield from self._turns(inner, times, params["length"], automatic, passed)
            case name if name in _EXCHANGES:
                axes = params["axis_name"]
                axes = axes if isinstance(axes, tuple) else (axes,)
                yield Exchange(
                    _EXCHANGES[name],
                    axes,
                    min(_bytes(equation.invars[0].aval), _bytes(equation.outvars[0].aval)),
                    times,
                )
            case "while":
                inner, _ = open_jaxpr(params["body_jaxpr"])
                yield from self.products(inner, times * self._windows(equation, inner), automatic, {})
            case "cond":
                opened = [_open(one, known, equation.invars[1:]) for one in params["branches"]]
                branches = [list(self.products(inner, times, automatic, passed)) for inner, passed in opened]
                yield from max(branches, key=lambda ones: sum(one.flops for one in ones))
            case "shard_map":
                inner, passed = _open(params["jaxpr"], known, equation.invars)
                yield from self.products(inner, times, automatic - newly_manual_axes(params), passed)
            case name if name in CALLS:
                inner, passed = _open(params[CALLS[name]], known, equation.invars)
                yield from self.products(inner, times, automatic, passed)
            case _:
                for inner in jaxprs_in_params(params):
                    yield from self.products(inner, times, automatic, {})

    def _turns(
        self, body: Any, times: float, length: int, automatic: frozenset[str], known: Mapping[Any, Any]
    ) -> Iterator[_Product | Exchange]:
        """Yield those of a loop; in that over a pipeline's ticks a conditional runs in some of the turns."""
        equations = read_equations(body)
        conditionals = [equation for equation in equations if equation.primitive.name == "cond"]
        shares = [1.0] * len(conditionals)
        if self.ticks is not None and (length, len(conditionals)) == (self.ticks.turns, len(self.ticks.shares)):
            shares = list(self.ticks.shares)
        for equation in equations:
            share = shares.pop(0) if equation.primitive.name == "cond" else 1.0
            yield from self.of_equation(equation, times * length * share, automatic, known)

    def _windows(self, equation: Any, body: Any) -> int:
        """How often a loop runs that exchanges rows in windows, if all devices have as many: its rows over a window's.

        Any other loop counts once.
        """
        moved = [one.size for one in self.products(body, 1, frozenset(), {}) if isinstance(one, Exchange)]
        rows = [_bytes(var.aval) for var in equation.outvars if len(var.aval.shape) == 2]
        return math.ceil(max(rows) / max(moved)) if rows and moved else 1

    def _dot(
        self,
        equation: Any,
        times: float,
        automatic: frozenset[str],
        left: Sequence[int],
        right: Sequence[int],
        batch: Sequence[int],
    ) -> _Product:
        a, b = (var.aval for var in equation.invars[:2])
        out = equation.outvars[0].aval
        contracted = math.prod(b.shape[dim] for dim in right)
        many = math.prod(a.shape[dim] for dim in batch)
        rows = max(1, math.prod(a.shape) // (many * (contracted if left else 1)))
        columns = max(1, out.size // (many * rows)) if left else out.shape[-1]
        share = times / self.parts(equation, automatic)
        size = 0.0 if self.inside else float(_bytes(a) + _bytes(b) + _bytes(out))
        wider = max((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
        return _Product(
            _where(equation),
            f"{list(a.shape)} x {list(b.shape)}",
            str(wider),
            _passes(equation.params.get("precision")),
            times,
            2.0 * out.size * contracted * share,
            size * share,
            lambda unit: _fill(rows, contracted, columns, unit),
        )

    def _kernel(
        self, equation: Any, times: float, automatic: frozenset[str], known: Mapping[Any, Any]
    ) -> Iterator[_Product]:
        """The products of a Pallas kernel: those of its body at each place of its grid where the mask is not empty."""
        params = equation.params
        inner, _ = open_jaxpr(params["jaxpr"])
        grid = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
        name = str(params.get("name") or _where(equation))
        share = _visited(name, equation, params["grid_mapping"], known) / self.parts(equation, automatic)
        body = [one for one in self.products(inner, 1, frozenset(), {}) if isinstance(one, _Product)]
        touched = sum(_bytes(var.aval) for var in (*equation.invars, *equation.outvars))
        estimate = params.get("cost_estimate")
        if estimate is not None or body:
            flops = float(estimate.flops) if estimate is not None else grid * sum(one.flops for one in body) * share
            dtype = body[0].dtype if body else "bfloat16"
            passes = max((one.passes for one in body), default=1)
            shapes = " x ".join(str(list(var.aval.shape)) for var in equation.invars if len(var.aval.shape) > 2)

            def fill(unit: int) -> float:
                total = sum(one.flops for one in body)
                return total / sum(one.flops / one.fill(unit) for one in body) if total else 1.0

            yield _Product(name, shapes, dtype, passes, times, flops * times, float(touched) * times, fill)

    def _cudnn(self, equation: Any, times: float, automatic: frozenset[str]) -> _Product:
        """Attention by cuDNN: two products forward, five backward; half of the logits where it is causal."""
        query, key = (var.aval for var in equation.invars[:2])
        forward = equation.primitive.name == "dot_product_attention_fwd_wrapper"
        # Undocumented: the layout BTNH and the mask types of jax._src.cudnn.fused_attention_stablehlo.
        causal = "CAUSAL" in str(equation.params.get("mask_type", ""))
        share = times / self.parts(equation, automatic) * (0.5 if causal else 1.0)
        flops = 2.0 * query.size * key.shape[-3] * (2 if forward else 5) * share
        touched = float(sum(_bytes(var.aval) for var in (*equation.invars, *equation.outvars))) * share
        name = f"cudnn attention, {'forward' if forward else 'backward'}"
        shapes = f"{list(query.shape)} x {list(key.shape)}"
        return _Product(name, shapes, str(query.dtype), 1, times, flops, touched, lambda _: 1.0)


def _visited(name: str, equation: Any, grid_mapping: Any, known: Mapping[Any, Any]) -> float:
    """The share of a kernel's grid that it computes: of splash attention the blocks that its mask does not empty.

    Its second scalar operand says for each block whether it is empty (0), partly or wholly visible.
    """
    count = grid_mapping.num_index_operands
    if name.startswith("splash") and count > 1:
        mask = known.get(equation.invars[1])
        if mask is not None and mask.size:
            return float(np.count_nonzero(mask) / mask.size)
    return 1.0


def _fill(rows: int, contracted: int, columns: int, unit: int) -> float:
    """The share of a matrix unit that a product fills: it holds a tile of one operand, through which the other streams.

    >>> _fill(8192, 128, 8192, 256)
    0.5
    >>> _fill(8192, 4096, 14336, 128)
    1.0
    """
    if not unit:
        return 1.0
    # The longer of the two outer dimensions streams, row by row.
    held = (contracted, min(rows, columns))
    return math.prod(size / (math.ceil(size / unit) * unit) for size in held)


def _cost(ones: Sequence[_Product], chip: Chip | None) -> ProductCost:
    flops, size = sum(one.flops for one in ones), sum(one.bytes for one in ones)
    first, compute, memory = ones[0], 0.0, 0.0
    if chip is not None:
        fill = first.fill(chip.mxu)
        compute = compute_seconds(chip, flops, first.dtype, passes=first.passes, fill=fill)
        memory = size / chip.hbm_bandwidth
    seconds = (compute + TRAFFIC[0] * memory, compute + TRAFFIC[1] * memory)
    count = round(sum(one.times for one in ones))
    return ProductCost(first.where, first.shapes, first.dtype, count, flops, size, compute, seconds)


def _where(equation: Any) -> str:
    """The line of the user's model, or of a ready-made one, that asks for an equation; else that of our code."""
    lines = [(file, line) for file, line, _ in equation_frames(equation) if not _LIBRARIES & set(Path(file).parts)]
    own = [
        (file, line) for file, line in lines if not is_jaxshard_file(file) or "/models/" in file or "/layers/" in file
    ]
    for file, line in own or lines:
        return f"{Path(file).name}:{line}"
    return str(equation.primitive.name)


def _passes(precision: Any) -> int:
    """How many bf16 passes a precision asks of a TPU: its lax.Precision, or a pair of them."""
    names = str(precision).upper()
    return 6 if "HIGHEST" in names else 3 if "HIGH" in names else 1


def _bytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else math.prod(aval.shape) * dtype.itemsize


def _is_small(value: Any) -> bool:
    """Whether a constant may be a kernel's mask: an array of integers."""
    dtype = getattr(value, "dtype", None)
    return dtype is not None and np.issubdtype(dtype, np.integer) and value.size < 2**24


def _open(program: Any, known: Mapping[Any, Any], passed: Sequence[Any]) -> tuple[Any, dict[Any, Any]]:
    """Return an inner program and what is known of its first arguments, those `passed`, and constants."""
    jaxpr, consts = open_jaxpr(program)
    pairs = zip(passed, jaxpr.invars, strict=False)
    inside = {new: known[old] for old, new in pairs if not isinstance(old, Literal) and old in known}
    return jaxpr, inside | {var: x for var, x in zip(jaxpr.constvars, consts, strict=False) if _is_small(x)}
