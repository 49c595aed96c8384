"""`js.moe`: check the arguments, route tokens, and split the experts by the current layout.

    check arguments -> route, on global arrays -> compute each device's tokens and experts -> weighted sum

Shape suffixes such as `_NC` are explained in `experts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxshard.core.constrain import Activations, activations_in_force, devices_in_force
from jaxshard.core.counting import is_counting
from jaxshard.core.marks import is_marking, leave_mark
from jaxshard.core.mesh import axis_size, slice_indices
from jaxshard.core.placement import spec_entry
from jaxshard.core.tree import path_str, raise_all
from jaxshard.core.types import PyTree
from jaxshard.layers.moe.exchange import Form, form_for
from jaxshard.layers.moe.experts import Experts, Share, apply_all, apply_share, window_rows
from jaxshard.layers.moe.grouped import Dot
from jaxshard.layers.moe.products import Way
from jaxshard.layers.moe.routing import Choice, Routing, Scores, room_of, route


def moe(
    x: Float[Array, "*batch tokens width"],
    router_logits: Float[Array, "*batch tokens experts"],
    fn: Callable[[PyTree, jax.Array, Dot], jax.Array],
    params: PyTree,
    *,
    k: int,
    scores: Scores = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: Float[Array, " experts"] | None = None,
    capacity: float | None = None,
    hidden: PyTree = None,
) -> tuple[Float[Array, "*batch tokens width"], Routing]:
    """Send each token to k experts, and sum their outputs, weighted by the router.

    `fn` defines what experts compute, for rows that are sorted by expert. It multiplies by the experts' matrices with
    `dot`; all other operations must treat every row independently:

        def fn(params, rows, dot):                                   # rows: [any number, C]
            hidden = jax.nn.silu(dot(rows, params["gate"])) * dot(rows, params["up"])
            return dot(hidden, params["down"])                       # for a bias b: + dot.of(b)

        out, routing = js.moe(x, x @ router, fn, params, k=2)        # gate, up: [E, C, H], down: [E, H, C]

    Without `capacity` no token is dropped, however unbalanced the routing is. Each row is multiplied only by the
    matrices of its own expert: by Pallas kernels (megablox) on TPUs, elsewhere in blocks.

    The current layout determines the sharding. Under `js.expert` each device holds some of the experts, and rows are
    sent to the devices of their experts by ragged all-to-alls; on CPUs and large v5e slices by ordinary all-to-alls, in
    which all devices send each other equally many rows. In one exchange a device receives at most a fixed number of
    rows, a window (at most 1.25 times a balanced load), and there are as many exchanges as the most loaded device needs
    (the same number on all devices of a TPU slice): unbalanced routing costs time, not memory. The backward pass
    exchanges the rows again and recomputes hidden activations; gradients of the matrices are summed over windows in
    f32. Under `js.tensor` the dimensions of `hidden` are split, and outputs are all-reduced once. Under `js.auto` the
    experts run in a `shard_map` over all axes, under `js.explicit` and in pipeline stages on the device's own rows.
    Without `js.expert` and `js.tensor` there are no collectives.

    Args:
      x: the tokens.
      router_logits: one logit for each expert, [*batch, tokens, E]. If any logit of a token is NaN, its output is NaN.
      fn: (params, rows, dot) -> as many rows of the same width. `dot(x, w)` multiplies each row by its expert's matrix
        in w [experts of this device, C, H]; `dot.of(b)` selects each row's entry of b [experts of this device, ...].
      params: arrays whose first dimension is the experts.
      k: the number of experts for each token.
      scores: how logits become scores: a "softmax" over all experts, or a "sigmoid" for each.
      normalize: divide the scores of the chosen experts, their weights in the sum, by their total.
      scale: a factor by which these weights are multiplied.
      bias: added to the scores to choose the experts, but not to the weights; it has no gradient (DeepSeek-V3's
        balancing without a loss).
      capacity: the largest number of tokens of a row that an expert accepts, as a multiple of a balanced load:
        ceil(capacity * k * tokens / E). Tokens' first choices have priority, then earlier tokens. Other choices are
        dropped: they contribute nothing, and `Routing.dropped` counts them. The rows here are those of the batch, in
        the leading dimensions of `x`; an `x` of [tokens, C] is one row.
      hidden: for each array of `params` the dimension of the hidden units, which `js.tensor` splits like "mlp", such as
        {"gate": 2, "up": 2, "down": 1}. Without it every device of a tensor axis computes all hidden units.

    Returns:
      (the output, in the dtype that `fn` returns; a `Routing` with statistics of each row, for losses and metrics).

    Raises:
      ValueError: shapes that do not match, k larger than E, a capacity that is not positive; experts or hidden units
        that their mesh axes do not divide.
      TypeError: k is not an int, or `scores` is neither "softmax" nor "sigmoid".

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Gale et al. 2022, "MegaBlocks", for the products
    without capacity; DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2.

    Example:
        share = routing.load / (k * T / E)                           # [B, E], 1 where even
        balance = (share * routing.probabilities / T).sum(-1)        # [B], 1 where even
        loss = js.Mean(ce.sum(), ce.size) + 0.01 * js.Mean(balance.sum(), B)     # ce: f32[B, T]
    """
    x, logits = jnp.asarray(x), jnp.asarray(router_logits)
    E = _check_shapes(x, logits, k, scores, bias, capacity)
    activations = activations_in_force()
    room = None if capacity is None else room_of(capacity, x.shape[-2], k, E)
    if room is not None:
        _check_whole_rows(activations)
    choice, routing = route(logits, k, scores, normalize, scale, bias, room)
    split = _Split(activations, x, params, E, hidden)
    return split.apply(_checked(fn), x, choice, params, lossless=room is None), routing


# Arguments


def _check_shapes(x: jax.Array, logits: jax.Array, k: int, scores: str, bias: Any, capacity: float | None) -> int:
    """Check the arguments of `moe`; return the number of experts.

    Raises:
      ValueError: shapes that do not match, k outside of 1 to E, or a capacity that is not positive.
      TypeError: k is not an int, or unknown `scores`.
    """
    if x.ndim < 2 or logits.ndim != x.ndim or x.shape[:-1] != logits.shape[:-1]:
        raise ValueError(
            f"moe: x must be [*batch, tokens, width] and router_logits [*batch, tokens, experts] of the same tokens, "
            f"got x {list(x.shape)} and router_logits {list(logits.shape)}"
        )
    if min(*x.shape, *logits.shape) < 1:
        raise ValueError(f"moe: x {list(x.shape)} and router_logits {list(logits.shape)} must not be empty")
    E = logits.shape[-1]
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"moe: k must be an int, got {k!r}")
    if not 1 <= k <= E:
        raise ValueError(f"moe: k={k} experts for each token of the {E} that router_logits has; use k from 1 to {E}")
    if scores not in get_args(Scores):
        raise TypeError(f"moe: scores must be one of {', '.join(map(repr, get_args(Scores)))}, got {scores!r}")
    if bias is not None and jnp.shape(bias) != (E,):
        raise ValueError(f"moe: bias must be [{E}], one number for each expert, got {list(jnp.shape(bias))}")
    if capacity is not None and not capacity > 0:
        raise ValueError(
            f"moe: capacity must be positive, got {capacity}: 1.0 is room for balanced routing; None drops no token"
        )
    return E


def _check_whole_rows(activations: Activations | None) -> None:
    context = None if activations is None else activations.layout.context
    if is_marking() or (context is not None and activations is not None and set(context.axis) & activations.mesh()[1]):
        raise ValueError(
            "moe: capacity counts the tokens of full rows, but js.context, or the cache of js.generate, shows a part "
            "of their positions; leave capacity out, or use js.auto() under js.context"
        )


def _checked(fn: Experts) -> Experts:
    def checked(params: PyTree, rows: jax.Array, dot: Dot) -> jax.Array:
        y = fn(params, rows, dot)
        if jnp.shape(y) != rows.shape:
            raise ValueError(
                f"moe: fn must return one row of width {rows.shape[1]} for each of its {rows.shape[0]} rows, got "
                f"{list(jnp.shape(y))} for {list(rows.shape)}; does it end with the product back to that width?"
            )
        return y

    return checked


# The layout


def _axes_of_slices(mesh: Mesh, experts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mesh axes along which all devices are in one TPU slice, except the axes that split experts."""
    slices = slice_indices(mesh)
    within = [(slices == slices.take([0], dim)).all() for dim in range(slices.ndim)]
    return tuple(axis for axis, one in zip(mesh.axis_names, within) if one and axis not in experts)


class _Split:
    """The sharding of one call of `moe` over the devices of the mesh, by the current layout.

    If some mesh axes are not manual around the call, `apply` runs in a `shard_map` over these axes, and the
    PartitionSpecs of this class name only these axes.
    """

    def __init__(self, activations: Activations | None, x: jax.Array, params: PyTree, E: int, hidden: PyTree) -> None:
        self.E = E
        self.devices = devices_in_force()
        self.form: Form = "equal"
        self.mesh: Mesh | None = None
        self.automatic: frozenset[str] = frozenset()
        self.manual: frozenset[str] = frozenset()
        self.experts: tuple[str, ...] = ()
        self.others: tuple[str, ...] = ()
        self.tensor: tuple[str, ...] = ()
        if activations is not None and activations.layout.mesh.size > 1:
            self.mesh, self.manual = activations.mesh()
            self.automatic = frozenset(self.mesh.axis_names) - self.manual
            expert = activations.layout.expert
            self.experts = () if expert is None else expert.axis
            self.form = form_for(self.devices, None if expert is None else expert.exchange)
            self.others = _axes_of_slices(activations.layout.mesh, self.experts)
        _check_experts(params, E, self._size(self.experts), self._size(self._manual(self.experts)))
        self.rows: list[Any] = [None] * (x.ndim - 1)
        self.params: PyTree = None
        if activations is not None and self.automatic:
            self._place_rows(activations, x)
            self._place_params(activations, params, hidden)

    def _size(self, axes: tuple[str, ...]) -> int:
        return 1 if self.mesh is None else axis_size(self.mesh, axes)

    def _manual(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in self.manual)

    def _automatic(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if axis in self.automatic)

    def _place_rows(self, activations: Activations, x: jax.Array) -> None:
        layout = activations.layout
        batch = self._automatic(layout.batch_axes)
        if x.shape[0] % self._size(batch):
            batch = ()  # a single row (sampling) or a short batch: every device computes all rows
        self.rows[0] = spec_entry(batch)
        context = () if layout.context is None else self._automatic(layout.context.axis)
        if x.ndim > 2 and x.shape[-2] % self._size(context) == 0:
            self.rows[-1] = spec_entry(context)

    def _place_params(self, activations: Activations, params: PyTree, hidden: PyTree) -> None:
        dims = _hidden_dims(params, hidden)
        sizes = {leaf.shape[dim] for (_, leaf), dim in zip(_by_path(params), dims) if dim is not None}
        if sizes:
            found = {tuple(activations.axes("mlp", size, "moe")) for size in sizes}
            self.tensor = self._automatic(tuple(dict.fromkeys(axis for axes in found for axis in axes)))
        if self.tensor:
            raise_all(
                (f"{path} {list(leaf.shape)}" for (path, leaf), dim in zip(_by_path(params), dims) if dim is None),
                ValueError,
                f"moe: {self.tensor} splits the hidden units of all experts, and these arrays have none, so that each "
                "device would add them; leave them out, or keep the hidden units whole with the rule ('mlp', 'whole')",
            )
        first = spec_entry(self._automatic(self.experts))
        specs = []
        for (_, leaf), dim in zip(_by_path(params), dims):
            entries = [first, *(None for _ in leaf.shape[1:])]
            if dim is not None and self.tensor:
                entries[dim] = spec_entry(self.tensor)
            specs.append(PartitionSpec(*entries))
        self.params = jax.tree.unflatten(jax.tree.structure(params), specs)

    def apply(self, fn: Experts, x: jax.Array, choice: Choice, params: PyTree, lossless: bool) -> jax.Array:
        def on_device(x: jax.Array, choice: Choice, params: PyTree) -> jax.Array:
            x_NC = x.reshape(-1, x.shape[-1])
            own = Choice(*(part.reshape(x_NC.shape[0], -1) for part in choice))
            out_NC = self._on_device(fn, x_NC, own, params, lossless)
            return out_NC.reshape(x.shape)

        if is_marking():
            like, weights = jax.eval_shape(on_device, x, choice, params), jax.tree.leaves(params)
            dims = (-2, -2, -2, *(None for _ in weights))
            how = _program_text(fn, params, x)
            return leave_mark("js.moe", (x, *choice, *weights), dims, [like], (-2,), how)[0]
        if not self.automatic or is_counting():
            return on_device(x, choice, params)
        rows = PartitionSpec(*self.rows, None)
        partial = PartitionSpec(spec_entry(self.tensor), *rows)
        out = jax.shard_map(
            lambda *args: on_device(*args)[None],
            mesh=None if self.manual else self.mesh,  # nested: the mesh of the shard_map around it
            in_specs=(rows, Choice(rows, rows), self.params),  # type: ignore[arg-type]
            out_specs=partial,
            axis_names=self.automatic,
            check_vma=False,
        )(x, choice, params)
        # `out` has one partial sum for each device of the tensor axes. Summed outside of the shard_map, the derivative
        # needs no collective. Not by jnp.sum, which would sum bf16 in f32, nor by `lax.reduce`, whose derivative
        # permutes halves between devices.
        summed: jax.Array = jax.lax.reduce_sum(out, axes=(0,))
        return summed

    def _on_device(self, fn: Experts, x_NC: jax.Array, choice: Choice, params: PyTree, lossless: bool) -> jax.Array:
        way, count = Way(self.devices[0].platform, lossless, self.tensor), self._size(self.experts)
        if count == 1 or is_counting():
            return apply_all(fn, params, x_NC, choice, self.E, way)
        k = choice.experts.shape[1]
        window = window_rows(x_NC.shape[0] * k, k, count, self.E // count)
        share = Share(self.experts, count, self.E, window, way._replace(full=False), self.form, self.others)
        return apply_share(fn, params, x_NC, choice, share)


def _program_text(fn: Experts, params: PyTree, x: jax.Array) -> str:
    """Return the jaxpr of the user's function `fn` for eight rows, as text.

    The proof of `js.context` traces a loss with different numbers of positions. If the texts differ, what `fn` computes
    depends on the number of positions.
    """
    rows = jax.ShapeDtypeStruct((8, x.shape[-1]), x.dtype)
    sizes = jax.ShapeDtypeStruct((jax.tree.leaves(params)[0].shape[0],), jnp.int32)
    program = jax.make_jaxpr(lambda params, rows, sizes: fn(params, rows, Dot(8, sizes, Way("cpu"))))
    return re.sub("0x[0-9a-f]+", "", str(program(params, rows, sizes)))  # addresses of functions


def _check_experts(params: PyTree, E: int, devices: int, split_already: int) -> None:
    """Check that the first dimension of every array of `params` is the number of experts.

    Inside a `shard_map` over the axes of the experts, this is the number of this device's experts.

    Args:
      params: the experts' parameters.
      E: the number of all experts.
      devices: the number of devices over which `js.expert` splits experts.
      split_already: the number of devices over which the arrays are split already, by manual axes around the call.

    Raises:
      ValueError: another first dimension, no arrays, or experts that the devices do not divide.
    """
    if E % devices:
        raise ValueError(
            f"moe: the {devices} devices over which js.expert splits experts do not divide the {E} of router_logits; "
            f"use a multiple of {devices} experts, or a smaller axis"
        )
    leaves = _by_path(params)
    if not leaves:
        raise ValueError("moe: params has no arrays")
    here = E // split_already
    raise_all(
        (f"{path} {list(jnp.shape(leaf))}" for path, leaf in leaves if jnp.shape(leaf)[:1] != (here,)),
        ValueError,
        f"moe: router_logits has {E} experts, so the first dimension of every array of params must be {here}"
        + (f", this device's share over {split_already} devices" if split_already > 1 else ""),
    )


def _by_path(params: PyTree) -> list[tuple[str, Any]]:
    return [(path_str(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]]


def _hidden_dims(params: PyTree, hidden: PyTree) -> list[int | None]:
    """Return for each array of `params` the dimension of the hidden units, None for an array without hidden units."""
    leaves = _by_path(params)
    if hidden is None:
        return [None] * len(leaves)
    dims, found = jax.tree.flatten(hidden, is_leaf=lambda dim: dim is None)
    expected: Any = jax.tree.structure(params)
    if found != expected:
        raise ValueError(
            f"moe: hidden must have the tree of params, with a dimension for each array: got {found} for {expected}"
        )
    raise_all(
        (
            f"{path} {list(leaf.shape)}: {dim!r}"
            for (path, leaf), dim in zip(leaves, dims)
            if dim is not None and (not isinstance(dim, int) or not 1 <= dim < leaf.ndim)
        ),
        ValueError,
        "moe: hidden must name a dimension of the array after that of the experts, from 1 on",
    )
    return list(dims)
