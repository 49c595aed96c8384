"""The part of `js.moe` that runs on one device, which holds all experts or a shard of the experts.

If a device has all experts, it sorts the tokens by expert, and JAX differentiates the products. If it has a shard of
the experts, rows are exchanged between devices in windows of a fixed number of rows (`exchange.py`), and a custom_vjp
defines the backward pass: it sends the rows again and recomputes each window's hidden activations, so that no residual
has the size of a window or of the hidden layer.

Shape suffixes: N tokens, k experts of each token, R = N * k rows sorted by expert, M rows of a window, C width, E
experts on all devices. A choice is a pair of a token and one of its experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jaxshard.core.types import PyTree
from jaxshard.layers.moe.exchange import Form, Slices, Window, count_windows, exchange, gather_counts, plan_window
from jaxshard.layers.moe.grouped import Dot
from jaxshard.layers.moe.products import Way
from jaxshard.layers.moe.routing import Choice

Experts = Callable[[PyTree, jax.Array, Dot], jax.Array]
"""The user's function, `fn` of `js.moe`: (params, rows sorted by expert, dot) -> rows."""

ROOM = 1.25
"""The size of a window, as a multiple of the rows that a device receives under balanced routing."""
LARGEST = 4096
"""The most rows of a window, or 2048 for each expert if that is more: enough for matrix products at full speed."""


class Order(NamedTuple):
    """The permutation that sorts R = N * k choices by expert. A choice is a pair of a token and one of its k experts.

    Attributes:
      of_rows: int32[R], the index of the choice for each sorted row.
      of_choices: int32[R], the index of the sorted row for each choice.
      counts: int32[E], the number of rows of each expert; dropped choices are sorted to the end and not counted.
    """

    of_rows: jax.Array
    of_choices: jax.Array
    counts: jax.Array


def sort_by_expert(experts_Nk: jax.Array, E: int) -> Order:
    """Sort all pairs (token, one of its k experts) by expert, and by token within an expert.

    Args:
      experts_Nk: int32[N, k], the experts of each token; E for a dropped choice.
      E: the number of experts.
    """
    flat = experts_Nk.ravel()
    of_rows = jnp.argsort(flat, stable=True).astype(jnp.int32)
    of_choices = jnp.argsort(of_rows).astype(jnp.int32)
    # The first sorted row of each expert; row E is the first dropped choice.
    edges = jnp.searchsorted(flat[of_rows], jnp.arange(E + 1), method="sort").astype(jnp.int32)
    return Order(of_rows, of_choices, edges[1:] - edges[:-1])


# All experts on this device.


def apply_all(fn: Experts, params: PyTree, x_NC: jax.Array, choice: Choice, E: int, way: Way) -> jax.Array:
    """Compute the weighted sum over each token's experts, if every device has all experts. No collectives.

    Args:
      fn: the user's function, which computes the experts.
      params: its parameters, with a first dimension of E experts.
      x_NC: the tokens.
      choice: the experts of each token and their weights.
      E: the number of experts.
      way: how grouped matrix products are computed.
    """
    order = sort_by_expert(choice.experts, E)
    rows = _sort_tokens(choice.experts.shape[1], x_NC, order)
    y = fn(params, rows, Dot(rows.shape[0], order.counts, way))
    return _weigh(_unsort(y, order), choice, E)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sort_tokens(k: int, x_NC: jax.Array, order: Order) -> jax.Array:
    """Repeat each token for its k experts, and sort the rows by expert: [N, C] -> [N * k, C].

    Its backward pass sums the rows of each token by a gather, since JAX's own would be a slow scatter.
    """
    return x_NC[order.of_rows // k]


def _sort_forward(k: int, x_NC: jax.Array, order: Order) -> tuple[jax.Array, Order]:
    return _sort_tokens(k, x_NC, order), order


def _sort_backward(k: int, order: Order, dx_RC: jax.Array) -> tuple[jax.Array, None]:
    return _sum_choices(k, dx_RC, order), None


_sort_tokens.defvjp(_sort_forward, _sort_backward)


def _sum_choices(k: int, dx_RC: jax.Array, order: Order) -> jax.Array:
    """Sum the k rows of each token, given in the order that is sorted by expert: [N * k, C] -> [N, C].

    Rows of dropped choices have undefined values and are left out.
    """
    own = order.of_choices < order.counts.sum()
    dx = jnp.where(own[:, None], dx_RC[order.of_choices], 0).reshape(-1, k, dx_RC.shape[1])
    return dx.sum(1, dtype=jnp.promote_types(dx.dtype, jnp.float32)).astype(dx_RC.dtype)


@jax.custom_vjp
def _unsort(y_RC: jax.Array, order: Order) -> jax.Array:
    return y_RC[order.of_choices]


def _unsort_forward(y_RC: jax.Array, order: Order) -> tuple[jax.Array, Order]:
    return _unsort(y_RC, order), order


def _unsort_backward(order: Order, dy_RC: jax.Array) -> tuple[jax.Array, None]:
    return dy_RC[order.of_rows], None


_unsort.defvjp(_unsort_forward, _unsort_backward)


def _weigh(y_RC: jax.Array, choice: Choice, E: int) -> jax.Array:
    """Sum the outputs of each token's k experts, multiplied by the router's weights, in f32: [N * k, C] -> [N, C].

    The rows are in the order of the tokens, not sorted by expert. Dropped choices count as zero.
    """
    y_NkC = y_RC.reshape(*choice.experts.shape, -1)
    y_NkC = jnp.where((choice.experts < E)[..., None], y_NkC, 0)
    weights = jnp.where(choice.experts < E, choice.weights, 0 * choice.weights)  # 0 * NaN keeps a NaN of the router
    dtype = jnp.promote_types(y_RC.dtype, jnp.float32)
    return (weights[..., None] * y_NkC.astype(dtype)).sum(1).astype(y_RC.dtype)


# A shard of the experts on every device.


class Load(NamedTuple):
    """The rows that all devices exchange, and the number of rounds that this takes.

    Attributes:
      counts: int32[devices, E], the number of rows that each device has for each expert.
      windows: the number of rounds in which the rows are exchanged.
    """

    counts: jax.Array
    windows: jax.Array


class Share(NamedTuple):
    """The split of experts over devices, and the choices of how rows are exchanged and products are computed.

    Attributes:
      axes: the manual mesh axes over which experts are split.
      devices: the number of devices along these axes.
      experts: the number of experts on all devices together.
      window: the most rows that a device receives in one round of the exchange.
      way: how grouped matrix products are computed.
      form: "ragged" or "equal" all-to-alls.
      others: the manual mesh axes besides `axes`. For every index along these, the devices along `axes` are a group of
        their own, which exchanges rows.
    """

    axes: tuple[str, ...]
    devices: int
    experts: int
    window: int
    way: Way
    form: Form
    others: tuple[str, ...] = ()

    def count_windows(self, counts: jax.Array) -> jax.Array:
        """Return the number of rounds that the busiest group of devices needs: the same number on all, by a pmax.

        `counts` is int32[devices, E], the number of rows that each device has for each expert.

        A group of devices that needs fewer rounds could stop earlier. But then the loop, which has collectives, would
        run more iterations in other groups. That is safe only for collectives with device groups, and a compiler may
        replace these by permutes, which have no groups and wait for all devices.
        """
        count = count_windows(counts, self.window, self.form)
        most: jax.Array = jax.lax.pmax(count, self.others) if self.others else count
        return most

    def inputs(self, x_NC: jax.Array) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Return the shapes of the inputs of the experts in one round of the exchange.

        Returns:
          (the received rows [window, C], the number of received rows of each expert of this device, int32[experts /
          devices]).
        """
        rows = jax.ShapeDtypeStruct((self.window, x_NC.shape[1]), x_NC.dtype)
        return rows, jax.ShapeDtypeStruct((self.experts // self.devices,), jnp.int32)

    def plan(self, counts: jax.Array, index: jax.Array) -> Window:
        """Compute which rows this device sends and receives in one round of the exchange.

        Args:
          counts: int32[devices, E], the rows that each device has for each expert.
          index: the index of the round.
        """
        return plan_window(counts, jax.lax.axis_index(self.axes), index, self.window, self.form)

    def exchange(self, rows: jax.Array, into: jax.Array, sent: Slices, received: Slices) -> jax.Array:
        """Exchange slices of `rows` between the devices that share the experts, by all-to-alls.

        Return `into` with the received slices written to it. To send rows back, swap `sent` and `received`.
        """
        pair = None if self.form == "ragged" else self.window // self.devices
        return exchange(rows, into, sent, received, self.axes, pair)


def window_rows(rows: int, k: int, devices: int, experts_here: int) -> int:
    """Return the most rows that a device receives in one round of the exchange, which is the size of its buffer.

    The smallest of: the most rows that a device can receive at all, `ROOM` times the rows of a balanced load, and a
    limit (`LARGEST`, or half of it for each expert on the device if that is more); rounded up.

    Args:
      rows: the number of rows that each device sends, N * k.
      k: the number of experts of a token, all different, so that a device receives a token at most once for each expert
        there.
      devices: the number of devices over which experts are split.
      experts_here: the number of experts on each device.
    """
    worst = devices * (rows // k) * min(k, experts_here)
    enough = min(math.ceil(rows * ROOM), max(LARGEST, LARGEST // 2 * experts_here))
    # A multiple of the devices, for exchanges of equal counts; if large, also of 512, the tile of the TPU kernel.
    multiple = 8 * devices if enough < LARGEST else 512 * devices // math.gcd(512, devices)
    return min(worst, -(-enough // multiple) * multiple)


def apply_share(fn: Experts, params: PyTree, x_NC: jax.Array, choice: Choice, share: Share) -> jax.Array:
    """Compute the weighted sum over each token's experts, which are split over devices.

    Collectives: an all-gather of the counts int32[E], and a pmax of a scalar over the other manual mesh axes. For each
    round two exchanges of rows in the forward pass and five in the backward pass; two of the five send one scalar per
    row.

    Args:
      fn: the user's function, which computes the experts.
      params: its parameters, with a first dimension of this device's experts.
      x_NC: this device's tokens.
      choice: the experts of each token and their weights.
      share: how experts are split, and how rows are exchanged.
    """
    order = sort_by_expert(choice.experts, share.experts)
    program = _close(fn, params, *share.inputs(x_NC), share.way)
    counts = gather_counts(order.counts, share.axes)
    load = Load(counts, share.count_windows(counts))
    y: jax.Array = _apply(share, program.call, x_NC, choice, program.floats, program.others, order, load)
    return y


class _Program(NamedTuple):
    """The user's function, with all arrays that it reads as arguments, as `jax.custom_vjp` requires.

    Attributes:
      call: (floats, others, rows, number of rows of each expert) -> rows.
      floats: the floating-point arrays that the function reads: parameters, and arrays that it closes over.
      others: the arrays of other dtypes that the function reads.
    """

    call: Callable[[Sequence[jax.Array], Sequence[Any], jax.Array, jax.Array], jax.Array]
    floats: list[jax.Array]
    others: list[Any]


def _close(fn: Experts, params: PyTree, rows: Any, sizes: Any, way: Way) -> _Program:
    leaves, tree = jax.tree.flatten(params)

    def of_leaves(leaves: list[Any], rows: jax.Array, sizes: jax.Array) -> jax.Array:
        return fn(jax.tree.unflatten(tree, leaves), rows, Dot(rows.shape[0], sizes, way))

    # The constants of the jaxpr are the arrays that `fn` closes over, tracers of the surrounding trace included.
    closed = jax.make_jaxpr(of_leaves)(leaves, rows, sizes)
    jaxpr: Jaxpr = closed.jaxpr
    values = [*leaves, *closed.consts]
    is_float = [jnp.issubdtype(jnp.result_type(value), jnp.inexact) for value in values]

    def call(floats: Sequence[jax.Array], others: Sequence[Any], rows: jax.Array, sizes: jax.Array) -> jax.Array:
        first, second = iter(floats), iter(others)
        merged = [next(first) if yes else next(second) for yes in is_float]
        result: jax.Array
        (result,) = jax.core.eval_jaxpr(jaxpr, merged[len(leaves) :], *merged[: len(leaves)], rows, sizes)
        return result

    floats = [value for value, yes in zip(values, is_float) if yes]
    return _Program(call, floats, [value for value, yes in zip(values, is_float) if not yes])


def _empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return an uninitialized array; the caller must read only what it has written."""
    array: jax.Array = jax.lax.empty(shape, dtype)
    return array


def _mask(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Set the unused rows of `x` to zero: all rows after the first `sizes.sum()`."""
    own = jnp.arange(x.shape[0]) < sizes.sum()
    return jnp.where(own.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _apply(
    share: Share, call: Any, x_NC: jax.Array, choice: Choice, floats: Any, others: Any, order: Order, load: Load
) -> jax.Array:
    k = choice.experts.shape[1]
    rows_RC = x_NC[order.of_rows // k]
    dtype = jax.eval_shape(call, floats, others, *share.inputs(x_NC)).dtype
    # Results overwrite the rows that were sent, which saves a buffer; rows of later windows stay until they are sent.
    in_place = dtype == x_NC.dtype

    def window(index: jax.Array, y_RC: jax.Array) -> jax.Array:
        plan = share.plan(load.counts, index)
        got = _empty((share.window, x_NC.shape[1]), x_NC.dtype)
        got = share.exchange(y_RC if in_place else rows_RC, got, plan.sent, plan.received)
        out = call(floats, others, _mask(got, plan.sizes), plan.sizes)
        return share.exchange(out, y_RC, plan.received, plan.sent)

    y_RC = rows_RC if in_place else _empty(rows_RC.shape, dtype)
    y_RC = jax.lax.fori_loop(0, load.windows, window, y_RC)
    return _weigh(y_RC[order.of_choices], choice, share.experts)


def _apply_forward(share: Share, call: Any, *args: Any) -> tuple[jax.Array, Any]:
    return _apply(share, call, *args), args


def _apply_backward(share: Share, call: Any, kept: Any, dout_NC: jax.Array) -> tuple[Any, ...]:
    """Compute the gradients: send each round's rows again, recompute the experts' outputs, and send the gradients back.

    `kept` are the arguments of the forward pass, `dout_NC` is the gradient with respect to its result. The gradient of
    a row's router weight w is sum(dout * y), computed on the device of the row's expert. That device therefore receives
    dout and w, not w * dout.
    """
    x_NC, choice, floats, others, order, load = kept
    N, k = choice.experts.shape
    token = order.of_rows // k
    dout_RC, w_R = dout_NC[token], choice.weights.ravel()[order.of_rows]

    def window(index: jax.Array, carry: Any) -> Any:
        rows_RC, dw_R, sums = carry
        plan = share.plan(load.counts, index)

        def receive(rows: jax.Array) -> jax.Array:
            into = _empty((share.window, *rows.shape[1:]), rows.dtype)
            return _mask(share.exchange(rows, into, plan.sent, plan.received), plan.sizes)

        x, dout, w = receive(rows_RC), receive(dout_RC), receive(w_R)
        y, pull = jax.vjp(lambda floats, x: call(floats, others, x, plan.sizes), floats, x)
        dtype = jnp.promote_types(y.dtype, jnp.float32)
        dw = (dout.astype(dtype) * _mask(y, plan.sizes).astype(dtype)).sum(-1).astype(w.dtype)
        dfloats, dx = pull((w[:, None] * dout.astype(dtype)).astype(y.dtype))
        rows_RC = share.exchange(dx, rows_RC, plan.received, plan.sent)
        dw_R = share.exchange(dw, dw_R, plan.received, plan.sent)
        return rows_RC, dw_R, [total + part.astype(total.dtype) for total, part in zip(sums, dfloats)]

    # Sum the gradients of all windows in f32: rounding after each window would lose digits.
    zeros = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in floats]
    start = (x_NC[token], _empty(w_R.shape, w_R.dtype), zeros)
    dx_RC, dw_R, sums = jax.lax.fori_loop(0, load.windows, window, start)
    dfloats = [total.astype(x.dtype) for total, x in zip(sums, floats)]
    dx_NC = _sum_choices(k, dx_RC, order)
    dw_Nk = jnp.where(choice.experts < share.experts, dw_R[order.of_choices].reshape(N, k), 0)
    dchoice = Choice(None, dw_Nk)  # type: ignore[arg-type]  # integers have no derivative
    return dx_NC, dchoice, dfloats, None, None, None


_apply.defvjp(_apply_forward, _apply_backward)
