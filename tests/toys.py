"""Three small models with masked losses, and the plain one-device loop that every sharded run is compared with.

Sizes are odd on purpose: no dimension of the MLPs is divisible by 8 devices. Half of the rows or tokens weigh nothing,
and most of those lie in the last rows, so that devices hold very different shares of the weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxshard as js
from jaxshard.models.gpt import gpt

PyTree = Any
ROWS, FEATURES, CLASSES = 16, 13, 7


class Toy(NamedTuple):
    """A model of the contract with one global batch. `batch` is NumPy, so that it has no device yet."""

    init_fn: Callable[[jax.Array], PyTree]
    loss_fn: Callable[[PyTree, PyTree, jax.Array], js.Mean | js.Loss]
    batch: PyTree
    rate: float = 0.1


@cache
def gpt_toy(**changes: Any) -> Toy:
    """Width 32, 2 blocks, 16 rows of 16 tokens, through `js.Stacked`."""
    sizes = {"vocab": 65, "width": 32, "depth": 2, "heads": 4, "seq": 16} | changes
    model = gpt(**sizes)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, sizes["vocab"], (ROWS, sizes["seq"] + 1), dtype=np.int32)
    return Toy(model.init, model.loss, {"tokens": tokens, "weights": mask((ROWS, sizes["seq"]))})


@cache
def linen_toy() -> Toy:
    """A Linen MLP 13 -> 27 -> 1001 -> 7."""

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (27, 1001):
                x = jnp.tanh(nn.Dense(width)(x))
            return nn.Dense(CLASSES)(x)

    module = MLP()

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> js.Mean:
        return cross_entropy(module.apply({"params": params}, batch["x"]), batch)

    return Toy(lambda key: module.init(key, jnp.zeros((1, FEATURES)))["params"], loss_fn, classes(), rate=0.01)


@cache
def nnx_toy() -> Toy:
    """An NNX MLP 13 -> 33 -> 7 with a scale, as pure parameters: split when it is made, merged in the loss."""

    class MLP(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.first = nnx.Linear(FEATURES, 33, rngs=rngs)
            self.scale = nnx.Param(jnp.ones(()))
            self.last = nnx.Linear(33, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x)) * self.scale[...])

    graph, start = nnx.split(nnx.eval_shape(lambda: MLP(nnx.Rngs(0))))

    def init_fn(key: jax.Array) -> PyTree:
        return nnx.to_pure_dict(nnx.state(MLP(nnx.Rngs(key)), nnx.Param))

    def loss_fn(params: PyTree, batch: PyTree, key: jax.Array) -> js.Mean:
        state = jax.tree.map(lambda x: x, start)
        nnx.replace_by_pure_dict(state, params)
        return cross_entropy(nnx.merge(graph, state, copy=True)(batch["x"]), batch)

    return Toy(init_fn, loss_fn, classes())


TOYS: dict[str, Callable[[], Toy]] = {"gpt": gpt_toy, "linen": linen_toy, "nnx": nnx_toy}


def normal(seed: int, *shape: int) -> jax.Array:
    """Random parameters without a program that draws them, which takes longest to compile of a small model's."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def mask(shape: tuple[int, ...]) -> np.ndarray:
    """Weights 0, 1 and 2: few zeros in the first rows, almost nothing else in the last ones, row 3 all zero."""
    rng = np.random.default_rng(1)
    falling = np.linspace(1, 0.1, shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
    weights = rng.integers(1, 3, shape) * (rng.random(shape) < falling)
    weights[3] = 0
    return weights.astype(np.float32)


def classes() -> PyTree:
    """Rows to classify, with weights."""
    rng = np.random.default_rng(2)
    return {
        "x": rng.normal(size=(ROWS, FEATURES)).astype(np.float32),
        "y": rng.integers(0, CLASSES, ROWS, dtype=np.int32),
        "weights": mask((ROWS,)),
    }


def cross_entropy(logits: jax.Array, batch: PyTree) -> js.Mean:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return js.Mean((losses * batch["weights"]).sum(), batch["weights"].sum())


class Trace(NamedTuple):
    """What five steps left behind: a loss, a gradient and metrics per step, parameters and state at the end."""

    losses: list[float]
    grads: list[PyTree]
    params: PyTree
    state: PyTree
    metrics: tuple[PyTree, ...] = ()


def recording(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx`, with the last gradient kept as state: how tests see gradients without another program."""

    def init(params: PyTree) -> PyTree:
        return {"grads": jax.tree.map(jnp.zeros_like, params), "inner": tx.init(params)}

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        updates, inner = tx.update(grads, state["inner"], params)
        return updates, {"grads": grads, "inner": inner}

    return optax.GradientTransformation(init, update)


def one_device(toy: Toy, tx: optax.GradientTransformation | None = None, *, steps: int = 5) -> Trace:
    """The training loop that everybody writes, on one device; of this package only the values that a loss returns."""
    tx = optax.sgd(toy.rate) if tx is None else tx
    model, key = jax.tree.map(jnp.asarray, start_of(toy.init_fn)), one_device_key()
    params, state = model if isinstance(model, js.Model) else (model, None)
    opt_state = tx.init(params)

    def objective(params: PyTree, state: PyTree, key: jax.Array) -> tuple[jax.Array, PyTree]:
        loss = toy.loss_fn(params if state is None else js.Model(params, state), toy.batch, key)
        value, state = (loss.value, loss.state) if isinstance(loss, js.Loss) else (loss, None)
        if isinstance(value, js.Mean):
            value = sum(total / weight for total, weight in zip(value.totals, value.weights, strict=True))
        return value, state

    @jax.jit
    def step(params, opt_state, state, key):
        (loss, state), grads = jax.value_and_grad(objective, has_aux=True)(params, state, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, loss, grads

    losses, gradients = [], []
    for number in range(steps):
        params, opt_state, state, loss, grads = step(params, opt_state, state, jax.random.fold_in(key, number))
        losses.append(float(loss))
        gradients.append(jax.device_get(grads))
    return Trace(losses, gradients, jax.device_get(params), jax.device_get(() if state is None else state))


@cache
def one_device_toy(name: str) -> Trace:
    """`one_device` of a toy, computed once."""
    return one_device(TOYS[name]())


@cache
def start_of(init_fn: Callable[[jax.Array], PyTree]) -> PyTree:
    """What `init_fn` makes of seed 0, as NumPy arrays."""
    return jax.device_get(jax.jit(init_fn)(jax.random.key(0)))


def one_device_key() -> jax.Array:
    """The key of a run with seed 0; step n draws from it folded with n."""
    return jax.random.fold_in(jax.random.key(0), 1)


def sharded(
    toy: Toy,
    strategy: js.Strategy,
    mesh: jax.sharding.Mesh,
    engine: Any,
    tx: optax.GradientTransformation | None = None,
    *,
    steps: int = 5,
    **layout_options: Any,
) -> tuple[Trace, js.Layout]:
    """The same run through `make_step`, and its layout."""
    step = recording_step(toy, strategy, mesh, engine, tx, **layout_options)
    return trained(step, toy, steps), step.layout


def recording_step(
    toy: Toy,
    strategy: js.Strategy,
    mesh: jax.sharding.Mesh,
    engine: Any,
    tx: optax.GradientTransformation | None = None,
    **layout_options: Any,
) -> Any:
    """A step of a toy that keeps its last gradient."""
    tx = recording(optax.sgd(toy.rate) if tx is None else tx)
    layout = js.layout(strategy, mesh, toy.init_fn, tx, **layout_options)
    return js.make_step(toy.loss_fn, tx, layout, engine=engine)


def trained(step: Any, toy: Toy, steps: int = 5) -> Trace:
    """What so many calls of a `recording_step` leave; parameters are given, not drawn, which compiles less."""
    layout = step.layout
    run = js.init(toy.init_fn, step.tx, layout, 0, init_from=start_of(toy.init_fn))
    losses, gradients, seen = [], [], []
    for _ in range(steps):
        run, metrics = step(run, toy.batch)
        losses.append(float(metrics["loss"]))
        seen.append(jax.device_get(metrics))
        gradients.append(model_order(layout.opt_state["grads"], run.opt_state["grads"]))
    params, state = model_order(layout.params, run.params), model_order(layout.state, run.state)
    return Trace(losses, gradients, params, state, tuple(seen))


def model_order(placements: PyTree, stored: PyTree) -> PyTree:
    """Stored arrays as NumPy in model order, without compiling anything."""
    return jax.tree.map(lambda x, placement: placement.view.invert(np.asarray(x)), stored, placements)


def loss_error(trace: Trace, reference: Trace) -> float:
    """The largest relative difference of a loss."""
    return worst(abs(a - b) / abs(b) for a, b in zip(trace.losses, reference.losses, strict=True))


def tree_error(tree: PyTree, reference: PyTree) -> float:
    """The worst leaf's largest difference over the larger of its largest magnitude and 1e-3 of the tree's."""
    assert jax.tree.structure(tree) == jax.tree.structure(reference)
    both = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in both]
    assert all(a.shape == b.shape for a, b in pairs)
    pairs = [(a, b) for a, b in pairs if b.size]
    floor = 1e-3 * worst(np.abs(b).max() for _, b in pairs)
    return worst(np.abs(a - b).max() / max(np.abs(b).max(), floor) for a, b in pairs)


def grad_error(trace: Trace, reference: Trace) -> float:
    """The worst `tree_error` of the gradients of any step."""
    return worst(tree_error(a, b) for a, b in zip(trace.grads, reference.grads, strict=True))


def worst(errors: Iterable[float]) -> float:
    """The largest, or NaN if there is one, which Python's max would pass over."""
    return float(np.max([0.0, *errors]))


def assert_equal_runs(trace: Trace, reference: Trace) -> None:
    """Losses within 1e-6 relative, gradients, parameters and state within 1e-5; NaN fails."""
    errors = {
        "loss": loss_error(trace, reference) / 1e-6,
        "gradients": grad_error(trace, reference) / 1e-5,
        "parameters": tree_error(trace.params, reference.params) / 1e-5,
        "state": tree_error(trace.state, reference.state) / 1e-5,
    }
    wrong = {name: f"{error:.2g} times the tolerance" for name, error in errors.items() if not error <= 1}
    assert not wrong, wrong


@contextmanager
def quick_compile() -> Iterator[None]:
    """Code generation without its optimizations, which the fast tier has anyway: for slow tests of many programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ)
