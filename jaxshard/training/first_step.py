"""Check the first step if tokens are sent to experts on other devices by ragged all-to-alls.

Ragged all-to-alls are new in XLA, and schedules with latency hiding have sent wrong rows on GPUs in the first backward
pass, though the loss was right (marin-community/marin, issue 8077 and pull request 8081). So the first batch is
computed twice: by the compiled step, and by a reference program that sends the tokens by padded all-to-alls, with equal
counts for all devices (`layers/moe/exchange.py`). The loss and the norm of each gradient must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from jaxshard.core.jaxpr import open_jaxpr
from jaxshard.core.layout import Layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.tree import raise_all
from jaxshard.core.types import PyTree
from jaxshard.layers.moe.exchange import form_for, use_form

_NORMS = 1e-3
"""The largest allowed relative difference of gradient norms in f32: a hundred times the differences from rounding."""

_ROUNDINGS = 4
"""The largest allowed relative difference with smaller dtypes, as a multiple of the largest eps: 3e-2 for bf16."""

_LOSS_SHARE = 0.1
"""The loss, an average over more numbers, may differ by this fraction of the relative difference allowed for norms."""

_FLOOR = 1e-3
"""Differences are relative to a gradient's norm, or to this fraction of the full gradient's norm if that is larger."""


class Evidence(NamedTuple):
    """The results of the first step that are compared with the reference.

    Attributes:
      loss: the loss.
      squares: f32[trained parameters], the sum of squares of each parameter's gradient; NaN for a gradient that is not
        finite.
    """

    loss: jax.Array
    squares: jax.Array


def exchanges_ragged(layout: Layout) -> bool:
    """Return True if the layout places experts on several devices, and sends them tokens by ragged all-to-alls."""
    expert = layout.expert
    if expert is None or axis_size(layout.mesh, expert.axis) == 1:
        return False
    return form_for(list(layout.mesh.devices.flat), expert.exchange) == "ragged"


class FirstStep:
    """A comparison of the first step, whose all-to-alls are ragged, with a reference program that does not use them.

    The reference computes the loss and gradients of the same batch, but sends tokens to experts by padded all-to-alls.
    Call `compile`, then `expect` before the step, then `check` after it.

    Args:
      find: `find(run, batch) -> Evidence`: computes loss and gradients, in global view.
      layout: the layout of the step.
      paths: the paths of the trained parameters, in the order of `Evidence.squares`.
      options: options of `jax.jit`, the same as for the step.
    """

    def __init__(
        self, find: Callable[[PyTree, PyTree], Evidence], layout: Layout, paths: Sequence[str], **options: Any
    ) -> None:
        def reference(run: PyTree, batch: PyTree) -> Evidence:
            with use_form("equal"):
                return find(run, batch)

        self._jitted = jax.jit(reference, keep_unused=True, **options)
        self._paths, self._platform = tuple(paths), layout.mesh.devices.flat[0].platform
        self._compiled: Any = None
        self._allowed = 0.0
        self._expected: Evidence | None = None

    def compile(self, run: PyTree, batch: PyTree) -> None:
        """Compile the reference program once, and set from its dtypes the difference that `check` allows."""
        if self._compiled is None:
            traced = self._jitted.trace(run, batch)
            self._allowed = max(_NORMS, _ROUNDINGS * _rounding(traced.jaxpr))
            self._compiled = traced.lower().compile()

    def expect(self, run: PyTree, batch: PyTree) -> None:
        """Compute the reference loss and gradients and keep them for `check`, before the step donates `run`."""
        self._expected = jax.block_until_ready(self._compiled(run, batch))

    def check(self, found: Evidence) -> None:
        """Compare the step's results with those of the reference that `expect` kept.

        Raises:
          RuntimeError: they differ; the message names the loss or each parameter, with both numbers.
        """
        assert self._expected is not None
        raise_all(
            _differences(found, self._expected, self._paths, self._allowed),
            RuntimeError,
            "the first step differs from the same step with rows of experts exchanged by equal counts. Its ragged "
            f"all-to-alls brought wrong rows, and so would all further steps. {_remedy(self._platform)} "
            "js.make_step(..., check_exchange=False) leaves out this comparison. The run that the step was given is to "
            "be made, or restored, again",
        )


def _rounding(program: Any) -> float:
    """Return the largest eps of the floating dtypes in a program, but at least 2**-23, the eps of f32."""
    jaxpr: Any = open_jaxpr(program)[0]
    found = 2.0**-23
    for eqn in jaxpr.eqns:
        dtypes = (getattr(x.aval, "dtype", None) for x in eqn.outvars)
        floats = (dtype for dtype in dtypes if dtype is not None and jnp.issubdtype(dtype, jnp.floating))
        found = max([found, *(float(jnp.finfo(dtype).eps) for dtype in floats)])
        found = max([found, *map(_rounding, jaxprs_in_params(eqn.params))])
    return found


def _differences(found: Evidence, expected: Evidence, paths: Sequence[str], allowed: float) -> Iterator[str]:
    loss, other = float(found.loss), float(expected.loss)
    if not _close(loss, other, _LOSS_SHARE * allowed * abs(other)):
        yield f"loss {loss:.6g}, expected {other:.6g}, allowed {_LOSS_SHARE * allowed:.0e} relative"
    ours, theirs = (np.sqrt(np.asarray(one.squares, np.float64)) for one in (found, expected))
    finite = theirs[np.isfinite(theirs)]
    floor = _FLOOR * float(np.linalg.norm(finite))
    for path, norm, expected_norm in zip(paths, ours.tolist(), theirs.tolist(), strict=True):
        if not _close(norm, expected_norm, allowed * max(expected_norm, floor)):
            yield f"{path}: gradient of norm {norm:.6g}, expected {expected_norm:.6g}, allowed {allowed:.0e} relative"


def _close(a: float, b: float, allowed: float) -> bool:
    """Return True if two numbers differ by at most `allowed`, or are both NaN or the same infinity."""
    return a == b or abs(a - b) <= allowed or (np.isnan(a) and np.isnan(b))


def _remedy(platform: str) -> str:
    equal = 'js.expert(exchange="equal") exchanges equal counts'
    if platform != "gpu":
        return f"{equal}."
    return (
        "Compile without the scheduler that hides latency, with "
        f'options={{"xla_gpu_enable_latency_hiding_scheduler": False}} of your engine; {equal}.'
    )
