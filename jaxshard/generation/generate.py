"""`js.generate`: continue prompts with tokens drawn from a model, on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jaxshard.adapt.stacked import Stacked
from jaxshard.core.keys import typed_key
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.settings import with_own_settings
from jaxshard.core.types import PyTree
from jaxshard.generation.programs import Draw, Programs
from jaxshard.generation.sampling import Sampling
from jaxshard.training.base import matrix_layout, merge_given

_SMALLEST_PROMPT = 16
"""Prompts are padded to a power of two of at least this, so that other lengths need no other program."""
_SLOTS = 64
"""The cache has a multiple of so many slots, for the same reason."""


@with_own_settings
def generate(
    model: Stacked,
    params: PyTree,
    layout: Layout,
    prompts: Sequence[Sequence[int]] | np.ndarray | jax.Array,
    *,
    length: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Sequence[int | Sequence[int]] = (),
    key: jax.Array | int | None = None,
    readout: Callable[[PyTree, Any], jax.Array] | None = None,
) -> list[list[int]]:
    """Continue prompts with tokens drawn from a model, on any mesh.

    The prompts are read once. Then every token costs one position: keys and values of those before are in a cache,
    which is split over the batch axes by rows and over the axis of `js.tensor` by heads, and never moves. Both programs
    are compiled once, and again for other sizes only. The tokens are those of a full forward pass for each of them, up
    to rounding, and they do not depend on the mesh: a row's number and a token's position alone decide what is drawn.

    It runs any `js.Stacked` model whose blocks attend by `js.attention` (causal, with any window) and treat positions
    one by one otherwise; that is proven from the program, and what does not is refused. `embed` receives {"tokens",
    "targets", "positions"}, int32[B, T] each, of which the targets are zeros. A model that takes positions from
    `js.positions`, and not from its batch, reads prompts of different lengths in several groups.

    Collectives of a token: an all-gather of each weight over the axes over which it only rests split (`js.fsdp`), for a
    block at a time; the sums and exchanges of `js.tensor` and `js.expert`; an all-gather of the logits where the
    vocabulary is split. The blocks of a pipeline are gathered once, so that every device has all of them.

    Args:
      model: a `js.Stacked`, such as a `js.models.make(...)`.
      params: its parameters, as `layout` stores them (`run.params`) or in model order; or the run itself. The factors
        of `js.lora` are merged in first, which takes the bytes of a second model on the devices.
      layout: says where they live. Made by `js.layout(strategy, mesh, model.init)` it knows no optimizer.
      prompts: the tokens of each row, at least one; rows may have different lengths, and there may be any number.
      length: the largest number of new tokens in a row.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: draw from so many most likely tokens.
      top_p: draw from the fewest tokens whose probabilities add up to at least this.
      stop: a token, or several: a row that draws one of them ends with it. A sequence of tokens among them, such as
        `[2, [5, 7]]`, ends a row whose newest tokens it is.
      key: a seed or a random key; needed where tokens are drawn at random.
      readout: `readout(params, x) -> logits[B, T, V]` of what the last block returns, for a `js.Stacked` of your own;
        `params` are those without the blocks.

    Returns:
      For each prompt its tokens and the new ones, as lists. In several processes, the same in all of them.

    Raises:
      ValueError: a number or token that is out of range, rows that get longer than the model's `seq`, parameters that
        do not fit the layout, or a model that can't run with a cache; by name.
      TypeError: a model that is no `js.Stacked`.

    Example:
        layout = js.layout(js.compose(js.fsdp(), js.tensor()), mesh, model.init)
        tokens = js.generate(model, run.params, layout, [[1, 5, 9], [2]], length=64)
    """
    how = Sampling(temperature, top_k, top_p)
    how.check(has_key=key is not None)
    rows, programs = check_request(model, layout, prompts, length, readout)
    stops = _stop_sequences(stop)
    weights = programs.weights(merge_given(params.params if hasattr(params, "params") else params, layout))
    given = typed_key(0 if key is None else key)
    found: dict[int, list[int]] = {}
    for group in _groups(rows, programs.model.shares_positions):
        found |= _generate(
            programs, weights, rows, group, length, Draw(given, (), (), stops, how.arrays(programs.model.vocab))
        )
    return [found[number] for number in range(len(rows))]


def _generate(
    programs: Programs, weights: PyTree, rows: list[list[int]], group: list[int], length: int, given: Draw
) -> dict[int, list[int]]:
    """Continue the rows of a group of numbers; return their tokens by number."""
    layout, longest = programs.layout, max(len(rows[number]) for number in group)
    size = -(-(longest + length) // _SLOTS) * _SLOTS
    width = min(
        1 << (max(longest, _SMALLEST_PROMPT) - 1).bit_length(), getattr(programs.model.model, "seq", size), size
    )
    # Prompts that the devices do not divide are padded by copies of the last one.
    numbers = group + group[-1:] * (-len(group) % axis_size(layout.mesh, layout.batch_axes))
    tokens = np.zeros((len(numbers), width), np.int32)
    for at, number in enumerate(numbers):
        tokens[at, : len(rows[number])] = rows[number]
    lengths = np.array([len(rows[number]) for number in numbers], np.int32)
    given = given._replace(rows=np.array(numbers, np.uint32), prompts=lengths)
    state, stopped = programs.prefill(weights, tokens, given, size=size)
    one_at_a_time = layout.mesh.devices.flat[0].platform == "cpu"  # of simulated devices: two programs may hang
    for _ in range(length - 1):
        before = stopped
        if one_at_a_time:
            jax.block_until_ready(state)
            if len(given.stop) and bool(stopped):
                break
        state, stopped = programs.decode(weights, state, given)
        # Accelerators are a token ahead of this: one too many is computed, which changes nothing.
        if not one_at_a_time and len(given.stop) and bool(before):
            break
    tokens, lengths = map(np.asarray, jax.block_until_ready(programs.replicate((state.tokens, state.lengths))))
    return {number: tokens[at, : lengths[at]].tolist() for at, number in enumerate(group)}


def _groups(rows: list[list[int]], by_length: bool) -> list[list[int]]:
    """Return the numbers of rows that are read together: all, or those of each length."""
    if not by_length:
        return [list(range(len(rows)))]
    lengths = sorted({len(row) for row in rows})
    return [[number for number, row in enumerate(rows) if len(row) == length] for length in lengths]


# Arguments


def _as_rows(prompts: Any) -> list[list[int]]:
    rows = []
    for number, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        if row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            what = f"{row.dtype}{list(row.shape)}"
            raise ValueError(
                f"generate: prompt {number} must be a list of at least one token, whole numbers, got {what}"
            )
        rows.append([int(token) for token in row])
    if not rows:
        raise ValueError("generate: there are no prompts")
    return rows


def _stop_sequences(stop: Any) -> np.ndarray:
    """Return stop sequences as int32[N, longest], each padded in front with -1."""
    given = stop if isinstance(stop, Sequence) else np.atleast_1d(stop)
    rows = [np.atleast_1d(np.asarray(one)) for one in given]
    for row in rows:
        if (
            row.ndim != 1
            or not row.size
            or not np.issubdtype(row.dtype, np.integer)
            or not 0 <= row.min() <= row.max() < 2**31
        ):
            raise ValueError(f"generate: stop must be tokens or sequences of tokens, from 0 on, got {row.tolist()!r}")
    padded = np.full((len(rows), max(map(len, rows), default=1)), -1, np.int32)
    for number, row in enumerate(rows):
        padded[number, -len(row) :] = row
    return padded


def check_request(
    model: Stacked, layout: Layout, prompts: Any, length: int, readout: Callable[[PyTree, Any], jax.Array] | None = None
) -> tuple[list[list[int]], Programs]:
    """Return the prompts as lists, and the programs of the model, not compiled yet.

    Raises:
      ValueError, TypeError: as `generate`.
    """
    rows = _as_rows(prompts)
    if isinstance(length, bool) or length != int(length) or length < 1:
        raise ValueError(f"generate: length must be a whole number of at least 1, got {length}")
    programs = _programs(_Same(model), _Same(layout), _Same(readout))
    vocab, seq = programs.model.vocab, getattr(programs.model.model, "seq", None)
    for number, row in enumerate(rows):
        if wrong := [token for token in row if not 0 <= token < vocab]:
            raise ValueError(
                f"generate: prompt {number} has the token {wrong[0]}, but the model knows 0 to {vocab - 1}"
            )
    longest = max(map(len, rows))
    if seq is not None and longest > seq:
        raise ValueError(
            f"generate: a prompt of {longest} tokens is longer than the {seq} positions that the model was built for; "
            f"use one of at most {seq} tokens, or a model with seq={longest + length - 1}"
        )
    if seq is not None and longest + length - 1 > seq:  # the last token is drawn, not read
        raise ValueError(
            f"generate: a prompt of {longest} tokens and {length} new ones are more than the {seq} positions that the "
            f"model was built for; use a length of at most {seq + 1 - longest}, or a model with "
            f"seq={longest + length - 1}"
        )
    return rows, programs


class _Same:
    """A value that equals itself alone, as a key under which programs are kept."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@lru_cache(maxsize=4)
def _programs(model: _Same, layout: _Same, readout: _Same) -> Programs:
    return Programs(model.value, matrix_layout(layout.value), readout.value)
