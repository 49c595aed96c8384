"""Compiled steps, and what they communicate, for tests that compare them with numbers written out."""

from __future__ import annotations

import importlib.util
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxshard as js
from jaxshard.hlo.found import collectives, split_scalars
from jaxshard.models.gpt import gpt

without_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def tpu(test: Any) -> Any:
    """Marks a test that compiles for a TPU topology."""
    return pytest.mark.tpu(without_libtpu(test))


class Setup(NamedTuple):
    """A strategy with the axes of its mesh."""

    axes: dict[str, int]
    strategy: js.Strategy


def setups(min_size: int) -> dict[str, Setup]:
    """The named strategies on 8 devices."""
    return {
        "ddp": Setup({"data": 8}, js.ddp()),
        "zero1": Setup({"data": 8}, js.zero1(min_size=min_size)),
        "zero2": Setup({"data": 8}, js.zero2(min_size=min_size)),
        "fsdp": Setup({"data": 8}, js.fsdp(min_size=min_size)),
        "hsdp": Setup({"replica": 2, "data": 4}, js.hsdp(min_size=min_size)),
    }


def torus_setups(min_size: int) -> dict[str, js.Strategy]:
    """The same on a torus of 2 x 4: one mesh axis per dimension of it, both together as data axis."""
    axes = ("x", "y")
    return {
        "ddp": js.ddp(axes),
        "zero1": js.zero1(axes, min_size=min_size),
        "zero2": js.zero2(axes, min_size=min_size),
        "fsdp": js.fsdp(axes, min_size=min_size),
        "hsdp": js.hsdp("x", "y", min_size=min_size),
    }


class Program(NamedTuple):
    """A compiled step with the layout it was made for."""

    layout: js.Layout
    compiled: Any

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.layout.mesh


def gpt_program(
    mesh: jax.sharding.Mesh,
    strategy: js.Strategy,
    engine: Any,
    *,
    opaque: bool = False,
    rows: int = 16,
    tx: optax.GradientTransformation | None = None,
    **sizes: Any,
) -> Program:
    """The step of a GPT with Adam; `opaque` hides from the engine that it is made of blocks."""
    model = gpt(**sizes)
    tx = optax.adam(1e-3) if tx is None else tx
    layout = js.layout(strategy, mesh, model.init, tx)
    # `run` is the computation alone: an engine would recognise `model.loss` inside a function too.
    loss = (lambda params, batch, key: model.run(params, batch, key)) if opaque else model.loss
    step = js.make_step(loss, tx, layout, engine=engine)
    return Program(layout, step.compile({"tokens": jax.ShapeDtypeStruct((rows, sizes["seq"] + 1), jnp.int32)}))


Traffic = dict[tuple[str, str], int]
"""(kind, axes) -> a sum over all executions of a step, of whole, unscattered arrays."""


def traffic(program: Program) -> Traffic:
    """Bytes of arrays."""
    return _sums(program, lambda one: sum(one.sizes))


def elements(program: Program, dtype: str | None = None) -> Traffic:
    """Elements of arrays, of one dtype if it is given."""

    def size(one: Any) -> int:
        return sum(map(math.prod, one.shapes)) if dtype in (None, one.dtype) else 0

    return {key: total for key, total in _sums(program, size).items() if total}


def scalar_traffic(program: Program) -> Traffic:
    """Bytes of scalars."""
    return _sums(program, lambda one: sum(one.sizes), part=1)


def _sums(program: Program, size: Any, part: int = 0) -> Traffic:
    sums: Traffic = {}
    for one in split_scalars(collectives(program.compiled, program.mesh))[part]:
        assert not one.conditional
        key = (one.kind, "+".join(one.axes))
        sums[key] = sums.get(key, 0) + one.count * size(one)
    return sums
