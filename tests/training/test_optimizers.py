"""Every optimizer of optax in `make_step` on eight devices against plain optax on one, both given the same gradients.

Tolerance 1e-5, per array: the largest difference over the larger of the array's largest magnitude and 1e-3 of the
tree's. Nothing is small enough to stay whole (`min_size=0`), and some arrays have no dimension that divides: they are
padded.

`JAXSHARD_WRITE_DOCS=1 pytest tests/training/test_optimizers.py` writes docs/guides/optimizers.md anew.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxshard as js
from jaxshard.core.placement import axes_of
from jaxshard.core.tree import bytes_of
from jaxshard.engines.engine import Engine, Outcome
from jaxshard.training.convert import convert_optimizer
from tests.optim.proof.aliases import ALIASES, TYPICAL, WRAPPERS
from tests.training.optimizers import CASES, GIVEN, PARTS, REFUSED, Case

pytestmark = pytest.mark.fast_cases(2)

PyTree = Any
TOLERANCE = 1e-5
STEPS = 3
DEVICES = 8
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "optimizers.md"


@dataclass(frozen=True)
class Model:
    """Parameters of given shapes; as the model's state a gradient, which a test replaces before each step."""

    case: Case

    def values(self, seed: int) -> PyTree:
        """Magnitudes from 0.5 to 1.5 and signs that no seed changes: where signs are taken, nothing is near a jump."""
        signs, sizes = np.random.default_rng(0), np.random.default_rng(seed)

        def one(shape: tuple[int, ...]) -> np.ndarray:
            x = (signs.choice([-1, 1], shape) * sizes.uniform(0.5, 1.5, shape)).astype(np.float32)
            return x.astype(jnp.bfloat16) if self.case.low_precision and len(shape) > 1 else x

        return jax.tree.map(one, self.case.shapes, is_leaf=lambda x: type(x) is tuple)

    def params(self) -> PyTree:
        return jax.tree.map(lambda x: x * x.dtype.type(self.case.size), self.values(0))

    def grads(self, step: int) -> PyTree:
        """Half as large at every step: were they alike, L-BFGS would take differences of nearly equal numbers."""
        grads = jax.tree.map(lambda x: x * x.dtype.type(0.5**step), self.values(step + 1))
        if step == 1 and self.case.outlier != 1.0:
            grads["layer"]["kernel"][0, 0] *= self.case.outlier
        return grads

    def init(self, key: jax.Array) -> js.Model:
        params = jax.tree.map(jnp.asarray, self.params())
        return js.Model(params, jax.tree.map(jnp.zeros_like, params))

    def dim_names(self, params: PyTree) -> PyTree:
        """The blocks of `STACK` are stacked along their first dimension."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: ("blocks",) * ("blocks" in str(path[0])) + (None,) * (x.ndim - ("blocks" in str(path[0]))),
            params,
        )


@dataclass(frozen=True)
class Given(Engine):
    """The engine whose gradient is whatever the model's state holds."""

    def value_and_grad(self, loss_fn: Any, layout: js.Layout) -> Any:
        def store(x: jax.Array, placement: Any) -> jax.Array:
            return jax.lax.with_sharding_constraint(placement.view.apply(x), placement.sharding(layout.mesh))

        def given(params: PyTree, state: PyTree, batch: PyTree, key: jax.Array) -> tuple[Outcome, PyTree]:
            return Outcome(jnp.zeros(()), {}, state), jax.tree.map(store, state, layout.grads)

        return given


class Trace(NamedTuple):
    """What a run leaves behind, in model order, as NumPy: the updates of every step; the last parameters and state."""

    updates: list[PyTree]
    params: PyTree
    opt_state: PyTree


def one_device(model: Model) -> Trace:
    """Plain optax."""
    tx, params = model.case.make(), model.params()
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, updates

    history = []
    for number in range(STEPS):
        params, state, updates = step(params, state, model.grads(number))
        history.append(host(updates))
    return Trace(history, host(params), host(state))


def sharded(model: Model, strategy: Callable[..., js.Strategy]) -> tuple[Trace, js.TrainState, js.Layout]:
    """`make_step`."""
    tx = keeping_updates(model.case.make())
    layout = js.layout(strategy("data", min_size=0), js.make_mesh(data=DEVICES), model.init, tx)
    run = js.init(model.init, tx, layout, 0)
    step = js.make_step(lambda model, batch, key: 0.0, tx, layout, engine=Given(), guarded=False)
    history = []
    for number in range(STEPS):
        run = run._replace(state=jax.device_put(model.grads(number), layout.shardings(layout.state)))
        run, _ = step(run, {"rows": np.zeros(DEVICES, np.float32)})
        history.append(host(run.opt_state["updates"], layout.opt_state["updates"]))
    run, layout = (
        convert_optimizer(run, layout, layout.without_owners),
        layout.without_owners,
    )  # as all is stored that has no owner
    opt_state = host(run.opt_state["inner"], layout.opt_state["inner"])
    return Trace(history, host(run.params, layout.params), opt_state), run, layout


def keeping_updates(tx: Any) -> optax.GradientTransformation:
    """`tx` with the last updates in its state, where a test can read them."""

    def init(params: PyTree) -> PyTree:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return {"updates": zeros, "inner": tx.init(params)}

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        updates, inner = tx.update(grads, state["inner"], params)
        return updates, {"updates": updates, "inner": inner}

    return optax.GradientTransformation(init, update)


def host(tree: PyTree, placements: PyTree = None) -> PyTree:
    """Arrays as NumPy, those that rest in a layout in model order, their padding being zero; keys as their words."""

    def one(x: jax.Array, placement: Any = None) -> np.ndarray:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return np.asarray(jax.random.key_data(x))
        stored = np.asarray(x)
        if placement is None:
            return stored
        logical = placement.view.invert(stored)
        assert np.count_nonzero(logical) == np.count_nonzero(stored), "padding is not zero"
        return logical

    return jax.tree.map(one, tree) if placements is None else jax.tree.map(one, tree, placements)


def difference(tree: PyTree, reference: PyTree) -> float:
    """The largest difference of the worst array, as the first lines of this file measure it; integers must be equal."""
    assert jax.tree.structure(tree) == jax.tree.structure(reference)
    pairs = list(zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True))
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    floats = [(np.float64(a), np.float64(b)) for a, b in pairs if jnp.issubdtype(b.dtype, jnp.floating)]
    assert all((a == b).all() for a, b in pairs if not jnp.issubdtype(b.dtype, jnp.floating))
    floor = 1e-3 * max((np.abs(b).max(initial=0) for _, b in floats), default=0)
    gaps = [(np.abs(a - b).max(initial=0), max(np.abs(b).max(initial=0), floor)) for a, b in floats]
    return float(np.max([gap / scale for gap, scale in gaps if gap != 0], initial=0))  # a NaN stays one


def check(name: str, strategy: Callable[..., js.Strategy]) -> None:
    model = Model(CASES[name])
    plain = js.layout(js.ddp("data"), js.make_mesh(data=DEVICES), model.init, model.case.make())
    guarded = js.make_step(lambda model, batch, key: 0.0, model.case.make(), plain).guarded
    assert guarded == (name not in OWN_RULES)
    expected = one_device(model)
    trace, run, layout = sharded(model, strategy)
    assert any(np.any(x) for updates in expected.updates for x in jax.tree.leaves(updates)), "nothing was updated"
    for number in range(STEPS):
        assert difference(trace.updates[number], expected.updates[number]) <= TOLERANCE, f"step {number}"
    assert difference(trace.params, expected.params) <= TOLERANCE
    assert difference(trace.opt_state, expected.opt_state) <= TOLERANCE
    check_split(run, layout)


def check_split(run: js.TrainState, layout: js.Layout) -> None:
    """Asserts that on every device there is an eighth of every array that can be split."""
    params = jax.tree_util.tree_leaves_with_path(layout.shapes.params)
    arrays = jax.tree.leaves(run.opt_state)
    for (path, shape), x in zip(jax.tree_util.tree_leaves_with_path(layout.shapes.opt_state), arrays, strict=True):
        like = [p for end, p in params if path[len(path) - len(end) :] == end and p.shape == shape.shape and p.ndim]
        part = math.prod(x.sharding.shard_shape(x.shape))
        assert {shard.data.size for shard in x.addressable_shards} == {part}
        if like or (jnp.issubdtype(x.dtype, jnp.floating) and shape.size > 1):
            assert DEVICES * part == x.size, f"{jax.tree_util.keystr(path)} is whole"
    if layout.strategy == js.fsdp("data", min_size=0):
        for x in jax.tree.leaves(run.params):
            assert x.size == 1 or DEVICES * math.prod(x.sharding.shard_shape(x.shape)) == x.size


STRATEGIES = {"zero2": js.zero2, "fsdp": js.fsdp}
OWN_RULES = {"zero_nans", "apply_if_finite", "skip_not_finite"}
"""For gradients that are not finite: a step has no guard beside them."""
FAST = [name for name in CASES if name in TYPICAL or name not in ALIASES | WRAPPERS][::3]
"""Every third of the typical ones and of what this package makes itself; the slow test runs every case."""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("name", "strategy"), [(name, [*STRATEGIES][i % 2]) for i, name in enumerate(FAST)])
def test_updates_equal_one_device_within_1e_5(name: str, strategy: str) -> None:
    check(name, STRATEGIES[strategy])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_updates_equal_one_device_within_1e_5_as_compiled_for_users(name: str, strategy: str) -> None:
    check(name, STRATEGIES[strategy])


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_more_than_gradients_says_so(name: str) -> None:
    make, error, message = REFUSED[name]
    model = Model(Case(make))
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(lambda params: make().update(params, make().init(params), params), model.values(0))
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=DEVICES), model.init, make())
    step = js.make_step(lambda model, batch, key: 0.0, make(), layout, engine=Given(), guarded=False)
    with pytest.raises(error, match=re.escape(message)):
        step.lower({"rows": np.zeros(DEVICES, np.float32)})


def test_a_state_that_grows_is_refused_by_name() -> None:
    def make() -> Any:
        return optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1))

    model = Model(Case(make))
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=DEVICES), model.init, make())
    step = js.make_step(lambda model, batch, key: 0.0, make(), layout, engine=Given(), guarded=False)
    with pytest.raises(ValueError, match=r"returned another state than tx\.init(?s:.*)0/measurements/norm: unexpected"):
        step.lower({"rows": np.zeros(DEVICES, np.float32)})


def test_the_list_is_complete() -> None:
    transforms = {
        name
        for module in (optax, contrib)
        for name, f in vars(module).items()
        if inspect.isfunction(f) and "GradientTransformation" in str(inspect.signature(f).return_annotation)
    }
    transforms = {name for name in transforms if not name.startswith(("_", "scale_by_"))}
    listed = {name.removeprefix("contrib.") for name in (*CASES, *GIVEN, *REFUSED)}
    assert transforms <= listed | PARTS
    assert len(CASES) >= 40


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    written = page()
    if os.environ.get("JAXSHARD_WRITE_DOCS"):
        PAGE.write_text(written)
    assert PAGE.read_text() == written, "docs/guides/optimizers.md is out of date; write it with JAXSHARD_WRITE_DOCS=1"


TABLES = {
    "| optimizer | runs on | state | split | whole | difference |": lambda: [_row(name) for name in CASES],
    "| transform | what it asks for |": lambda: [f"| `{name}` | {asked} |" for name, asked in GIVEN.items()],
    "| transform | error |": lambda: [
        f"| `{name}` | {refusal.error.__name__}: {refusal.message} |" for name, refusal in REFUSED.items()
    ],
}


def page() -> str:
    """The page with its tables made anew: everything in them comes from layouts and from the check."""
    text = PAGE.read_text()
    for head, rows in TABLES.items():
        before, found, after = text.partition(f"{head}\n{'|'.join(['', *['---'] * (head.count('|') - 1), ''])}\n")
        assert found, f"the page has no table {head}"
        text = before + found + "".join(f"{row}\n" for row in rows()) + re.sub(r"\A(\|.*\n)*", "", after)
    return text


def _row(name: str) -> str:
    tx, model = CASES[name].make(), Model(CASES[name])
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=DEVICES), model.init, tx)
    params = layout.shapes.params
    views = jax.tree.map(lambda x, p: jax.ShapeDtypeStruct(p.view.stored, x.dtype), params, layout.opt_params)
    runs_on = "stored" if js.optim.check_elementwise(tx, params, views=views) else "model order"
    runs_on = runs_on if layout.owners is None else "owners"
    layout = layout.without_owners
    sizes = {p.leaf.path: bytes_of(p.leaf.shape, p.leaf.dtype) for p in layout.placed() if p.role == "opt"}
    whole = {p.leaf.path for p in layout.placed() if p.role == "opt" and not axes_of(p.placement.store)}
    listed = [f"`{path}`" for path, size in sizes.items() if path in whole and size]
    total, kept = sum(sizes.values()), sum(sizes[path] for path in whole)
    share = f"{100 * (total - kept) / total:.1f} %" if total else ""
    names = ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
    cells = f"`{name}`", runs_on, f"{total} B", share, f"{names}: {kept} B" if listed else "", "<= 1e-5"
    return f"| {' | '.join(cells)} |"
