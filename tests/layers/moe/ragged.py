"""The ragged all-to-all of TPUs and GPUs, for CPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ragged_reference(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What JAX documents of `ragged_all_to_all`, which CPUs lack; NaN if the receiver expects other sizes."""
    me, n = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    slices = len(input_offsets) // n
    operands, starts, sizes, targets = (
        jax.lax.all_gather(x, axis_name) for x in (operand, input_offsets, send_sizes, output_offsets)
    )
    rows = jnp.arange(len(output))
    for sender in range(n):
        for i in range(slices):
            slice_ = me * slices + i
            within = rows - targets[sender, slice_]
            inside = (within >= 0) & (within < sizes[sender, slice_])
            expected = sizes[sender, slice_] == recv_sizes[sender * slices + i]
            sent = jnp.where(expected, operands[sender][(starts[sender, slice_] + within) % len(operand)].T, jnp.nan).T
            output = jnp.where(inside.reshape(-1, *(1,) * (output.ndim - 1)), sent, output)
    return output
