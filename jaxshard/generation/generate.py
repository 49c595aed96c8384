"""`js.generate`: continue prompts with tokens sampled from a model, on any mesh."""

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
"""Prompts are padded to a power of two, at least this, so that prompts of similar lengths share a compiled program."""
_SLOTS = 64
"""The size of the cache, in positions, is a multiple of this, so that similar lengths share a compiled program."""


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
    """Continue prompts with tokens sampled from a model, on any mesh.

    The model runs once on all tokens of a prompt (prefill). Then it runs on one position for each new token (decode): a
    KV cache has the keys and values of earlier positions. The cache is split by rows over the batch axes and by heads
    over the axis of `js.tensor`, and no collective moves it. Prefill and decode are compiled once for each size of the
    cache and of the prompts. The tokens equal those of a full forward pass for every token, up to rounding. They do not
    depend on the mesh: a token's random key is made from its row's index and its position.

    The model can be any `js.Stacked` whose blocks call `js.attention` (causal, with any window) and otherwise treat
    every position by itself. This is proven from the jaxpr; other models are refused. The model's `embed` receives
    {"tokens", "targets", "positions"}, int32[B, T] each; the targets are zeros. For a model that takes positions from
    `js.positions` and not from its batch, prompts are grouped by length, and each group runs separately.

    Collectives per token: an all-gather of each weight that is only stored sharded (`js.fsdp`), one block at a time;
    the all-reduces of `js.tensor` and all-to-alls of `js.expert`; an all-gather of the logits if the vocabulary is
    split. The blocks of a pipeline are gathered once, so that every device has all of them.

    Args:
      model: a `js.Stacked`, such as a `js.models.make(...)`.
      params: the model's parameters, as `layout` stores them (`run.params`) or in model order; or a `TrainState`. The
        factors of `js.lora` are merged into the matrices first, which needs the memory of a second model on the
        devices.
      layout: the layout of the parameters. `js.layout(strategy, mesh, model.init)`, without an optimizer, is enough.
      prompts: the tokens of each row, at least one per row; any number of rows, which may have different lengths.
      length: the largest number of new tokens in a row.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: sample from this many most likely tokens.
      top_p: sample from the smallest set of tokens whose probabilities add up to at least this.
      stop: tokens or token sequences that end a row, such as `[2, [5, 7]]`: token 2, or 5 followed by 7. The row keeps
        the tokens that ended it.
      key: a seed or a random key; needed if the temperature is above 0.
      readout: `readout(params, x) -> logits[B, T, V]` from the output of the last block, for your own `js.Stacked`;
        `params` has no blocks.

    Returns:
      For each prompt the list of its tokens followed by the new tokens; the same in all processes.

    Raises:
      ValueError: an argument or token out of range, rows that get longer than the model's `seq`, parameters that do not
        fit the layout, or a model that can't run with a cache.
      TypeError: the model is not a `js.Stacked`.

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
    """Continue some of the prompts; return {index of a prompt: its tokens and the new tokens}.

    Args:
      programs: the compiled programs.
      weights: the weights, from `programs.weights`.
      rows: all prompts.
      group: the indices of the prompts to continue.
      length: the largest number of new tokens.
      given: the arrays that control sampling; its `rows` and `prompts` are filled in here.
    """
    layout, longest = programs.layout, max(len(rows[number]) for number in group)
    size = -(-(longest + length) // _SLOTS) * _SLOTS
    # The next power of two, but no more positions than the model or the cache has.
    width = min(
        1 << (max(longest, _SMALLEST_PROMPT) - 1).bit_length(), getattr(programs.model.model, "seq", size), size
    )
    # Pad the rows to a multiple of the devices along the batch axes, by copies of the last row.
    numbers = group + group[-1:] * (-len(group) % axis_size(layout.mesh, layout.batch_axes))
    tokens = np.zeros((len(numbers), width), np.int32)
    for at, number in enumerate(numbers):
        tokens[at, : len(rows[number])] = rows[number]
    lengths = np.array([len(rows[number]) for number in numbers], np.int32)
    given = given._replace(rows=np.array(numbers, np.uint32), prompts=lengths)
    state, stopped = programs.prefill(weights, tokens, given, size=size)
    one_at_a_time = layout.mesh.devices.flat[0].platform == "cpu"  # two programs at once may hang simulated devices
    for _ in range(length - 1):
        before = stopped
        if one_at_a_time:
            jax.block_until_ready(state)
            if len(given.stop) and bool(stopped):
                break
        state, stopped = programs.decode(weights, state, given)
        # On accelerators look at the flag of the step before, which is ready by now: this hides the transfer, and costs
        # one decode step that appends nothing.
        if not one_at_a_time and len(given.stop) and bool(before):
            break
    tokens, lengths = map(np.asarray, jax.block_until_ready(programs.replicate((state.tokens, state.lengths))))
    return {number: tokens[at, : lengths[at]].tolist() for at, number in enumerate(group)}


def _groups(rows: list[list[int]], by_length: bool) -> list[list[int]]:
    """Return the indices of all prompts in one group; with `by_length` a group for each length of prompts."""
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
    """Convert the argument `stop` to an int32 array, a row per stop sequence: `[2, [5, 7]]` -> [[-1, 2], [5, 7]]."""
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
    """Check the arguments of `generate`, before anything is compiled.

    Returns:
      (the prompts as lists of tokens, the programs of the model, from an earlier call if there was one).

    Raises:
      ValueError, TypeError: see `generate`.
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
    """A wrapper that compares and hashes its value by identity, so that any object can be a key of `lru_cache`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


@lru_cache(maxsize=4)
def _programs(model: _Same, layout: _Same, readout: _Same) -> Programs:
    return Programs(model.value, matrix_layout(layout.value), readout.value)
