"""Replace batched matrix factorizations by loops over single matrices, for simulated CPU devices.

JAX's CPU backend divides a batch of matrices (`jax.numpy.linalg.eigh` of [L, n, n]) into tasks for the threads of the
process, and waits for these tasks. Simulated devices share the threads. If the other devices occupy all threads,
because they wait for this device in a collective or factorize batches too, the tasks never start: a deadlock. A single
matrix is factorized by the calling thread. Seen with JAX 0.10.2 and 0.12.0.1 in
`jax::ParallelBatchMap` of jaxlib's LAPACK kernels. To be deleted when that function no longer waits for threads of the
pool: tests/training/test_owners.py tries it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax

from jaxshard.core.jaxpr import all_equations, bind, equations_inside, open_jaxpr, replay
from jaxshard.proofs.dims import FACTORIZATIONS


def one_matrix_at_a_time(program: Any) -> Any:
    """Return a closed jaxpr in which each batched matrix factorization is a loop over single matrices.

    The results are the same, bit for bit if the library factorizes matrices one by one, as LAPACK does. Calls are
    inlined. A batch that the compiler would have split over devices is gathered.
    """
    return _with_loops(program) if any(map(_batch, all_equations(program))) else program


def _with_loops(program: Any) -> Any:
    return jax.make_jaxpr(lambda *args: replay(program, args, _loop))(*open_jaxpr(program)[0].in_avals)


def _batch(eqn: Any) -> tuple[int, ...]:
    """Return the batch dimensions of an equation that factorizes several matrices; () for any other equation."""
    if eqn.primitive.name not in FACTORIZATIONS:
        return ()
    batch = tuple(eqn.invars[0].aval.shape[:-2])
    return batch if math.prod(batch) > 1 else ()


def _loop(eqn: Any, operands: list[Any]) -> list[Any] | None:
    """Evaluate a batched factorization one matrix at a time, also if it is in an inner jaxpr of the equation.

    This is a rule of `replay`: it returns the results of the equation, or None for `replay` to evaluate it as usual.
    """
    if batch := _batch(eqn):
        flat = [x.reshape(math.prod(batch), *x.shape[len(batch) :]) for x in operands]
        made = lax.map(lambda matrices: bind(eqn, matrices), flat)
        return [x.reshape(*batch, *x.shape[1:]) for x in made]
    if any(map(_batch, equations_inside(eqn))):
        params = {name: _in_param(value) for name, value in eqn.params.items()}
        return bind(eqn.replace(params=params), operands)
    return None


def _in_param(value: Any) -> Any:
    """Rewrite the jaxprs in a parameter of an equation, such as a loop's body, to factorize one matrix at a time."""
    if type(value) is tuple:
        return tuple(map(_in_param, value))
    return one_matrix_at_a_time(value) if hasattr(value, "jaxpr") else value
