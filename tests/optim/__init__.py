"""Tests of `jaxshard.optim`."""

from functools import partial

import jax

fast_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""`jax.jit` for programs so small that compiling them takes all the time."""
