"""Attention of new positions over a KV cache, while `js.generate` runs.

    prefill     the positions 0 to T - 1 of every row attend to each other by the platform's kernel, and their keys and
                values are written to the cache
    decode      the keys and values of a few new positions are written to their slots, and each query sees all slots up
                to its own position, by the plain formula: with so few queries the logits are small

Each device writes and reads its own rows and heads of the cache, so there are no collectives.

Shape suffixes are explained in `formula.py` and `core/cache.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxshard.core.cache import Cache, Slots, Stored
from jaxshard.core.placement import spec_entry
from jaxshard.layers.attention.formula import Extras, Form, formula
from jaxshard.layers.attention.split import Split, heads_for


def check_cached(cache: Cache, extras: Extras, form: Form, T: int, S: int) -> None:
    """Check that a call of attention during generation can be computed from the KV cache.

    Args:
      cache: the current cache.
      extras: the optional arrays of the call, such as a bias.
      form: the static arguments of the call, such as `causal`.
      T: the number of queries of the call.
      S: the number of keys of the call.

    Raises:
      ValueError: the queries or keys are not exactly the cache's new positions, attention is not causal, or there is a
        mask, a bias or the like.
    """
    if T != S or cache.count != T:
        raise ValueError(
            f"attention: generation runs the model on {cache.count} positions of each row, of which this call has {T} "
            f"queries and {S} keys; a model for js.generate must attend with exactly the positions that "
            'batch["tokens"] has'
        )
    given = [name for name, x in extras._asdict().items() if x is not None and name != "windows"]
    why = "causal=False" if not form.causal else f"a {given[0]}" if given else ""
    if why:
        raise ValueError(
            f"attention: with {why} a query's keys are not the cached earlier positions; use causal=True and window"
        )


def attend_cached(
    cache: Cache,
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKE: jax.Array,
    form: Form,
    attend: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    windows_B: jax.Array | None = None,
) -> jax.Array:
    """Write the new keys and values to the KV cache, and compute causal attention of the new positions over it.

    Calls belong to the model's attention layers in order: each call uses the next layer's arrays in the cache, and
    increments `cache.calls`. Before these arrays exist, a call appends their shape to `cache.found` and attends without
    them.

    Args:
      cache: the current cache; changed in place.
      q_BTHD: the queries at the new positions.
      k_BTKD: the keys at the new positions.
      v_BTKE: the values at the new positions.
      form: static arguments: causal, with any window and soft cap.
      attend: (q, k, v) -> attention among the given positions only, for prefill.
      windows_B: the window of each row, if it is traced.
    """
    number = cache.calls
    cache.calls += 1
    split = Split.in_force(q_BTHD, k_BTKD, Extras(), form)
    spec = PartitionSpec(None, spec_entry(split.rows), spec_entry(split.kv_heads), None, None)
    if cache.stored is None:
        widths, dtypes = (k_BTKD.shape[-1], v_BTKE.shape[-1]), (k_BTKD.dtype, v_BTKE.dtype)
        cache.found.append(Slots(k_BTKD.shape[2], widths, dtypes, spec))
        return attend(q_BTHD, k_BTKD, v_BTKE)
    references = cache.stored[number]
    stored = jax.tree.map(lambda x: x[...], references)
    if cache.starts is None:
        stored = _write_prompt(split, spec, stored, cache.block, k_BTKD, v_BTKE)
        out = attend(q_BTHD, k_BTKD, v_BTKE)
    else:
        block = jnp.asarray(cache.block)
        out, stored = _attend_new(split, spec, q_BTHD, k_BTKD, v_BTKE, stored, block, cache.starts, windows_B, form)
    for reference, x in zip(references, stored):
        reference[...] = x
    return out


def _write_prompt(
    split: Split, spec: PartitionSpec, stored: Stored, block: jax.Array | int, k_BTKD: jax.Array, v_BTKE: jax.Array
) -> Stored:
    def write(into_LBKSD: jax.Array, x_BTKD: jax.Array) -> jax.Array:
        x_1BKTD = x_BTKD.swapaxes(1, 2)[None]
        if split.mesh is not None:
            x_1BKTD = lax.with_sharding_constraint(x_1BKTD, NamedSharding(split.mesh, spec))
        return lax.dynamic_update_slice(into_LBKSD, x_1BKTD, (block, 0, 0, 0, 0))

    return Stored(write(stored.keys, k_BTKD), write(stored.values, v_BTKE))


def _attend_new(
    split: Split,
    spec: PartitionSpec,
    q_BTHD: jax.Array,
    k_BTKD: jax.Array,
    v_BTKE: jax.Array,
    stored: Stored,
    block: jax.Array,
    starts_B: jax.Array,
    windows_B: jax.Array | None,
    form: Form,
) -> tuple[jax.Array, Stored]:
    shared_by = q_BTHD.shape[2] // k_BTKD.shape[2]

    def on_device(
        q_BTHD: jax.Array,
        k_BTKD: jax.Array,
        v_BTKE: jax.Array,
        stored: Stored,
        block: jax.Array,
        starts_B: jax.Array,
        windows_B: jax.Array | None,
    ) -> tuple[jax.Array, Stored]:
        (B, T, H, _), S = q_BTHD.shape, stored.keys.shape[3]
        at_BT = starts_B[:, None] + jnp.arange(T)
        rows_B1 = jnp.arange(B)[:, None]
        # A stopped row may be past the last slot; its writes are dropped.
        keys = stored.keys.at[block, rows_B1, :, at_BT].set(k_BTKD, mode="drop")
        values = stored.values.at[block, rows_B1, :, at_BT].set(v_BTKE, mode="drop")
        k_BSKD, v_BSKE = (lax.dynamic_index_in_dim(x, block, 0, False).swapaxes(1, 2) for x in (keys, values))
        if split.heads != split.kv_heads:
            k_BSKD, v_BSKE = (heads_for(x, H, shared_by, split.heads) for x in (k_BSKD, v_BSKE))
        distance_BTS = at_BT[:, :, None] - jnp.arange(S)
        seen_BTS = distance_BTS >= 0
        if form.window is not None:
            seen_BTS &= distance_BTS < form.window
        if windows_B is not None:
            seen_BTS &= distance_BTS < windows_B[:, None, None]
        alone = form._replace(causal=False, window=None)
        out_BTHE = formula(q_BTHD, k_BSKD, v_BSKE, Extras(mask=seen_BTS[:, None]), alone)
        return out_BTHE, Stored(keys, values)

    mesh = split.mesh
    if mesh is None or mesh.size == 1:
        return on_device(q_BTHD, k_BTKD, v_BTKE, stored, block, starts_B, windows_B)
    rows, heads, kv_heads = map(spec_entry, (split.rows, split.heads, split.kv_heads))
    query_spec, key_spec = PartitionSpec(rows, None, heads, None), PartitionSpec(rows, None, kv_heads, None)
    replicated, by_row = PartitionSpec(), PartitionSpec(rows)
    attended: tuple[jax.Array, Stored] = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(query_spec, key_spec, key_spec, Stored(spec, spec), replicated, by_row, by_row),  # type: ignore[arg-type]
        out_specs=(query_spec, Stored(spec, spec)),  # type: ignore[arg-type]
        check_vma=False,
    )(q_BTHD, k_BTKD, v_BTKE, stored, block, starts_B, windows_B)
    return attended
