"""Send rows that are sorted by expert to the devices of their experts, and back, by all-to-alls.

Each of the n devices along the mesh axis holds E / n experts. All devices know how many rows each device sends to every
expert, so each device can compute all offsets. On a device the rows arrive in the order (expert, sender):

    device 0 sends   a a b c d d       a, b: experts of device 0        device 0 receives   a a a b b
    device 1 sends   a b c c           c, d: experts of device 1        device 1 receives   c c c d d
                                                                                    in windows of 3 rows: a a a | b b .

The number of rows that a device receives depends on the routing, and may be the rows of all devices. So rows are
exchanged in rounds, as many as needed, in each of which a device receives at most a fixed number of rows, a window: no
row is dropped, and no buffer is larger than a window. There are two forms of exchange. With a balanced routing both
need a single window:

    ragged    a ragged all-to-all; a window has the next `rows` rows that a device receives
    equal     an all-to-all of equal counts; a window has the next `rows / n` rows of each pair of devices
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Form = Literal["ragged", "equal"]

_used = jax.make_user_context(default_value=None)


class Slices(NamedTuple):
    """The rows that a device sends (or receives) in an exchange, as slices of its array.

    There is a slice for each pair (other device, expert of the receiver). All fields are int32[devices * experts of a
    device]. An empty slice has the offset 0.

    Attributes:
      offsets: the first row of each slice in this device's array.
      sizes: the number of rows of each slice.
      remote: the first row of each slice in the other device's array.
    """

    offsets: jax.Array
    sizes: jax.Array
    remote: jax.Array


class Window(NamedTuple):
    """The rows that a device sends and receives in one round of the exchange.

    Attributes:
      sent: the slices that it sends of its rows (sorted by expert), for each receiver and expert.
      received: the slices of the received array that it gets, for each sender and expert.
      sizes: int32[experts of a device], the number of received rows of each expert; received rows are sorted by expert.
    """

    sent: Slices
    received: Slices
    sizes: jax.Array


def use_form(form: Form) -> AbstractContextManager[None]:
    """Make a context manager that fixes the form of exchange, "ragged" or "equal", whatever the devices support."""
    context: AbstractContextManager[None] = _used(form)
    return context


def form_for(devices: Sequence[Any], asked: Form | None = None) -> Form:
    """Return how devices exchange rows: "ragged" or "equal" all-to-alls.

    The first of these forms that is given: the form set by `use_form`; `asked`, the user's choice; the best form that
    the devices support.
    """
    used: Form | None = _used.value
    return used or asked or _best_form(devices)


def _best_form(devices: Sequence[Any]) -> Form:
    """Return "ragged" if the devices support ragged all-to-alls, else "equal".

    CPUs have no ragged all-to-all. Neither have v5e slices of more than 16 chips: libtpu 0.0.42 and 0.0.52 say "not
    supported in limited ICI routing settings". Try again with later versions.
    """
    if devices[0].platform == "cpu":
        return "equal"
    limited = "v5 lite" in getattr(devices[0], "device_kind", "").lower() and len(devices) > 16
    return "equal" if limited else "ragged"


def gather_counts(counts_E: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """All-gather how many rows each device has for each expert: int32[E] per device -> int32[devices, E]."""
    gathered: jax.Array = jax.lax.all_gather(counts_E, axes)
    return gathered


def count_windows(counts_nE: jax.Array, rows: int, form: Form) -> jax.Array:
    """Return the number of rounds in which all rows are exchanged: as many as the busiest device needs.

    Args:
      counts_nE: how many rows each device has for each expert.
      rows: the most rows that a device receives in a round.
      form: "ragged" or "equal" all-to-alls.
    """
    n = counts_nE.shape[0]
    of_pairs = counts_nE.reshape(n, n, -1).sum(-1)
    most, room = (of_pairs.sum(0), rows) if form == "ragged" else (of_pairs, rows // n)
    return -(-most.max() // room)


def plan_window(counts_nE: jax.Array, me: jax.Array, index: jax.Array, rows: int, form: Form) -> Window:
    """Compute which slices of rows this device sends and receives in one round of the exchange.

    Args:
      counts_nE: how many rows each device has for each expert.
      me: this device's index along the mesh axes.
      index: the index of the round.
      rows: the most rows that a device receives in a round.
      form: "ragged" or "equal" all-to-alls.
    """
    n = counts_nE.shape[0]
    counts = counts_nE.reshape(n, n, -1)  # [sender, receiver, expert there]
    own = (jnp.cumsum(counts_nE, 1) - counts_nE).reshape(counts.shape)  # first rows in the sender's array
    # `at` numbers the rows through all windows; a window has the rows first .. first + room of these.
    if form == "ragged":  # numbered among all rows that a device receives
        at, room = _pack(counts), rows
    else:  # numbered among all rows of a pair of devices
        at, room = own - own[..., :1], rows // n
    first = index * room
    begin, end = (jnp.clip(edge, first, first + room) for edge in (at, at + counts))
    sizes = end - begin
    here, there = (jnp.where(sizes > 0, offset, 0) for offset in (own + begin - at, _pack(sizes)))
    return Window(
        Slices(here[me].ravel(), sizes[me].ravel(), there[me].ravel()),
        Slices(there[:, me].ravel(), sizes[:, me].ravel(), here[:, me].ravel()),
        sizes[:, me].sum(0),
    )


def _pack(counts: jax.Array) -> jax.Array:
    """Return where each slice of sent rows begins in its receiver's array, which is sorted by (expert, sender).

    `counts` has the number of rows of each slice. Both `counts` and the result are int32[sender, receiver, expert of
    the receiver].
    """
    arrived = counts.transpose(1, 2, 0)
    ends = jnp.cumsum(arrived.reshape(arrived.shape[0], -1), 1).reshape(arrived.shape)
    return (ends - arrived).transpose(2, 0, 1)


def exchange(
    rows: jax.Array, into: jax.Array, sent: Slices, received: Slices, axes: tuple[str, ...], pair: int | None
) -> jax.Array:
    """Send slices of `rows` to other devices, and return `into` with the received slices written to it.

    Rows of `into` outside of the received slices stay as they are. To send received rows back, swap `sent` and
    `received`.

    Collectives: a ragged all-to-all if `pair` is None; else an all-to-all in which each device sends `pair` rows to
    every device.

    Args:
      rows: this device's rows.
      into: the array for received rows.
      sent: the slices of `rows` to send.
      received: the slices of `into` to receive.
      axes: the mesh axes over which experts are split.
      pair: the most rows that one device sends to another, for all-to-alls of equal counts; None for ragged ones.
    """
    if pair is None:
        ragged: jax.Array = jax.lax.ragged_all_to_all(
            rows, into, sent.offsets, sent.sizes, sent.remote, received.sizes, axis_name=axes
        )
        return ragged
    n: int = jax.lax.axis_size(axes)
    arrived = jax.lax.all_to_all(rows[_list_rows(sent, n, pair)], axes, 0, 0, tiled=True)
    at, found = _find_rows(received, n, pair, into.shape[0])
    return jnp.where(found.reshape(-1, *(1,) * (into.ndim - 1)), arrived[at], into)


def _list_rows(slices: Slices, n: int, pair: int) -> jax.Array:
    """Return the indices of the rows to send in an all-to-all of equal counts: `pair` indices for each of n devices.

    Unused places have the index 0.
    """
    offsets, sizes = (x.reshape(n, -1) for x in slices[:2])
    ends = jnp.cumsum(sizes, 1)
    i = jnp.arange(pair)
    which = (i[:, None] >= ends[:, None]).sum(-1)  # [peer, pair]: the slice of each entry, by counting ended slices
    last = sizes.shape[1] - 1
    begin = jnp.take_along_axis(offsets - (ends - sizes), jnp.minimum(which, last), 1)
    return jnp.where(which <= last, begin + i, 0).ravel()


def _find_rows(slices: Slices, n: int, pair: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Find where the rows of an array are in the result of an all-to-all of equal counts.

    Args:
      slices: the slices of the array that are received.
      n: the number of devices.
      pair: the number of rows that each device sends to every device.
      rows: the number of rows of the array.

    Returns:
      (int32[rows], each row's index in the result of the all-to-all; bool[rows], True if the row is received).
    """
    sizes = slices.sizes.reshape(n, -1)
    listed = jnp.cumsum(sizes, 1) - sizes + jnp.arange(n)[:, None] * pair
    within = jnp.arange(rows)[:, None] - slices.offsets
    inside = (within >= 0) & (within < slices.sizes)
    at = jnp.where(inside, listed.ravel() + within, 0).sum(-1)  # no row is in two slices
    return at, inside.any(-1)
