"""zero1, zero2 and fsdp in a hand-written shard_map loop: eight devices equal one, and move what they should."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxshard import optim
from jaxshard.hlo.found import collectives
from tests.toys import normal

from . import fast_jit

pytestmark = pytest.mark.fast_cases(1)

P = PartitionSpec
SHAPES = {"long": (1001,), "short": (7,), "one": (1,), "scalar": (), "cube": (3, 5, 16), "deep": {"bias": (2, 1)}}
MESHES = {"data": ((8,), ("data",)), ("x", "y"): ((4, 2), ("x", "y"))}
STEPS, ROWS = 3, 16


def make_params(shapes: Any, seed: int = 0) -> Any:
    shapes, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return tree.unflatten([normal(seed + number, *shape) for number, shape in enumerate(shapes)])


def mean_loss(params: Any, rows: jax.Array) -> jax.Array:
    """A loss to which every element of every parameter contributes differently in every row."""

    def row_loss(row: jax.Array) -> jax.Array:
        total = jnp.float32(0)
        for leaf in jax.tree.leaves(params):
            waves = jnp.cos(row * (1 + jnp.arange(leaf.size, dtype=jnp.float32))).reshape(leaf.shape)
            total += jnp.sum(leaf * waves) / max(1, leaf.size) ** 0.5
        return (total - row) ** 2

    return jnp.mean(jax.vmap(row_loss)(rows))


def data(step: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(step).uniform(-1, 1, ROWS).astype(np.float32))


def one_device(tx: optax.GradientTransformation, params: Any) -> tuple[list[float], Any]:
    @fast_jit
    def step(params: Any, state: Any, rows: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(mean_loss)(params, rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for number in range(STEPS):
        params, state, loss = step(params, state, data(number))
        losses.append(float(loss))
    return losses, params


@cache
def clipped_momentum() -> tuple[list[float], Any]:
    """What one device gives with optax's clipping and momentum."""
    return one_device(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)), make_params(SHAPES))


def make_mesh(axis: Any) -> jax.sharding.Mesh:
    sizes, names = MESHES[axis]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def make_loop(stage: str, tx: Any, params: Any, axis: Any, check_vma: bool, reduce: str = "mean", whole: bool = False):
    """(init, step, last) of a loop by hand; `last` gives whole parameters; `whole`: fsdp gets whole gradients."""
    wrapped = getattr(optim, stage)(tx, axis, reduce=reduce)
    shapes = jax.eval_shape(lambda: params)
    specs = optim.param_specs(shapes, axis, 8) if stage == "fsdp" else P()
    states = optim.state_specs(wrapped, shapes, axis, 8)
    mapped = partial(jax.shard_map, mesh=make_mesh(axis), check_vma=check_vma)
    share = 1.0 if reduce == "mean" else 1 / 8

    def init(params: Any) -> Any:
        own = optim.shard_params(params, axis) if stage == "fsdp" else params
        return own, wrapped.init(own)

    def step(params: Any, state: Any, rows: jax.Array) -> Any:
        if stage == "fsdp" and not whole:
            loss, grads = jax.value_and_grad(lambda p: share * mean_loss(optim.gather_params(p, shapes, axis), rows))(
                params
            )
        else:
            full = optim.gather_params(params, shapes, axis) if stage == "fsdp" else params
            full = jax.tree.map(lambda x: jax.lax.pcast(x, axis, to="varying") if varies_not(x, axis) else x, full)
            loss, grads = jax.value_and_grad(lambda p: share * mean_loss(p, rows))(full)
        updates, state = wrapped.update(grads, state, params)
        return optax.apply_updates(params, updates), state, jax.lax.psum(loss, axis) / (8 * share)

    def last(params: Any) -> Any:
        return optim.gather_params(params, shapes, axis) if stage == "fsdp" else params

    init = fast_jit(mapped(init, in_specs=P(), out_specs=(specs, states)))
    step = fast_jit(mapped(step, in_specs=(specs, states, P(axis)), out_specs=(specs, states, P())))
    gathered = jax.shard_map(last, mesh=make_mesh(axis), in_specs=(specs,), out_specs=P(), check_vma=False)
    return init, step, fast_jit(gathered)


def varies_not(x: jax.Array, axis: Any) -> bool:
    return not jax.typeof(x).mat.varying & set((axis,) if isinstance(axis, str) else axis)


def run(stage: str, tx: Any, params: Any, axis: Any = "data", **kwargs: Any) -> tuple[list[float], Any, Any]:
    init, step, last = make_loop(stage, tx, params, axis, **kwargs)
    own, state = init(params)
    losses = []
    for number in range(STEPS):
        own, state, loss = jax.block_until_ready(step(own, state, data(number)))
        losses.append(float(loss))
    return losses, jax.block_until_ready(last(own)), state


def assert_same(one: tuple[list[float], Any], many: tuple[list[float], Any]) -> None:
    """Losses to 1e-6; parameters to 1e-5 of the larger of the leaf's and 1e-3 of the tree's largest magnitude."""
    np.testing.assert_allclose(many[0], one[0], rtol=1e-6)
    expected, found = (jax.tree.leaves(jax.device_get(params)) for _, params in (one, many))
    largest = max(np.abs(x).max() for x in expected)
    for a, b in zip(expected, found, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(a).max(), 1e-3 * largest)


@pytest.mark.parametrize("stage", ["fsdp", "zero2", "zero1"])
@pytest.mark.parametrize(("axis", "check_vma"), [(("x", "y"), True), ("data", True), ("data", False)])
def test_eight_devices_equal_one(stage: str, axis: Any, check_vma: bool) -> None:
    """Losses to 1e-6, parameters to 1e-5, with clipping by the global norm and momentum, on odd shapes."""
    tx = optax.chain(optim.clip_by_global_norm(0.5, axis), optax.sgd(0.1, momentum=0.9))
    losses, last, state = run(stage, tx, make_params(SHAPES), axis, check_vma=check_vma)
    assert_same(clipped_momentum(), (losses, last))
    assert {x.shape: x.addressable_shards[0].data.shape for x in jax.tree.leaves(state[1][0].trace)} == {
        (1008,): (126,), (8,): (1,), (16,): (2,), (): (), (3, 5, 16): (3, 5, 2), (8, 1): (1, 1),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
def test_fsdp_takes_whole_gradients(check_vma: bool) -> None:
    """Losses to 1e-6, parameters to 1e-5, with gradients with respect to the gathered parameters."""
    tx = optax.chain(optim.clip_by_global_norm(0.5, "data"), optax.sgd(0.1, momentum=0.9))
    losses, last, _ = run("fsdp", tx, make_params(SHAPES), check_vma=check_vma, whole=True)
    assert_same(clipped_momentum(), (losses, last))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero1", "fsdp"])
def test_sum_is_for_shares_of_the_global_mean(stage: str) -> None:
    """Losses to 1e-6, parameters to 1e-5."""
    tx = optax.chain(optim.clip_by_global_norm(0.5, "data"), optax.sgd(0.1, momentum=0.9))
    losses, last, _ = run(stage, tx, make_params(SHAPES), check_vma=False, reduce="sum")
    assert_same(clipped_momentum(), (losses, last))


def moved(stage: str, axis: Any) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes of whole arrays that a compiled step moves, by kind and axes."""
    params = make_params(SHAPES)
    init, step, _ = make_loop(stage, optax.sgd(0.1), params, axis, check_vma=True)
    own, state = jax.eval_shape(init, params)
    total: dict[tuple[str, tuple[str, ...]], int] = {}
    for found in collectives(step.lower(own, state, data(0)).compile(), make_mesh(axis)):
        assert found.count is not None
        total[found.kind, found.axes] = total.get((found.kind, found.axes), 0) + found.count * sum(found.sizes)
    return total


WHOLE = 4 * (1001 + 7 + 1 + 240 + 2)
PADDED = 4 * (1008 + 8 + 16 + 240 + 8)
SCALARS = 4 * 2  # the scalar parameter's gradient, and the loss


@pytest.mark.parametrize("stage", ["zero1", "zero2", "fsdp"])
def test_collectives(stage: str) -> None:
    reduced = {("all-reduce", ("data",)): SCALARS, ("reduce-scatter", ("data",)): PADDED}
    if stage == "zero1":
        reduced = {("all-reduce", ("data",)): WHOLE + SCALARS}
    assert moved(stage, "data") == reduced | {("all-gather", ("data",)): PADDED}


def test_a_tuple_of_axes_is_taken_one_by_one() -> None:
    assert moved("zero2", ("x", "y")) == {
        ("reduce-scatter", ("x",)): PADDED,
        ("reduce-scatter", ("y",)): PADDED // 4,
        ("all-gather", ("y",)): PADDED // 4,
        ("all-gather", ("x",)): PADDED,
        ("all-reduce", ("x", "y")): SCALARS,
    }


# What is refused.


def trace(body: Any, check_vma: bool, *args: Any) -> Any:
    """Traces a function of replicated arguments inside shard_map over eight devices."""
    mapped = jax.shard_map(body, mesh=make_mesh("data"), in_specs=P(), out_specs=P(), check_vma=check_vma)
    return jax.eval_shape(mapped, *args)


def summed_by_mistake(stage: str) -> Any:
    params = make_params({"a": {"w": (8, 3)}, "s": ()})
    wrapped = getattr(optim, stage)(optax.sgd(0.1))

    def body(params: Any) -> Any:
        own = optim.shard_params(params) if stage == "fsdp" else params
        rows = data(0)[:2] * jax.lax.axis_index("data")
        grads = jax.grad(mean_loss)(params, rows)  # of replicated parameters: summed if types say so
        return jax.tree.map(jnp.sum, wrapped.update(grads, wrapped.init(own), own)[0])

    return body, params


@pytest.mark.parametrize("stage", ["zero1", "zero2", "fsdp"])
def test_summed_gradients_are_refused_where_types_tell(stage: str) -> None:
    body, params = summed_by_mistake(stage)
    trace(body, False, params)
    with pytest.raises(
        ValueError, match=r"already summed .*pcast\(params, 'data', to=\"varying\"\)\n  - a/w: .* 'data'"
    ):
        trace(body, True, params)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "fsdp"])
def test_refused_by_name(stage: str) -> None:
    params = make_params({"w": (4, 6), "b": (6,)})
    for tx, name in [
        (optax.clip_by_global_norm(1.0), r"clip_by_global_norm: reduce_sum at optax.*\(update b, update w\)"),
        (optax.lamb(0.1), "scale_by_trust_ratio: reduce_sum"),
        (optax.noisy_sgd(0.1, key=0), "add_noise: random_bits"),
    ]:
        with pytest.raises(
            ValueError, match=rf"{name}.*js.make_step.*js.optim.clip_by_global_norm\(max_norm, axis_name="
        ):
            trace(getattr(optim, stage)(tx).init, False, params)


def test_a_threshold_between_the_shapes_of_array_and_part_is_refused() -> None:
    params = make_params({"w": (256, 3)})
    large = optax.stateless(lambda updates, _: jax.tree.map(lambda u: u * (2 if u.size > 500 else 1), updates))
    assert optim.check_elementwise(large, params)
    for stage, shape in [("zero1", (256, 3)), ("zero2", (256, 3)), ("fsdp", (32, 3))]:
        with pytest.raises(ValueError, match="depends on the shape"):
            trace(getattr(optim, stage)(large).init, False, make_params({"w": shape}))


def test_outside_of_shard_map() -> None:
    params = make_params({"w": (8,)})
    for stage in ("zero1", "zero2", "fsdp"):
        with pytest.raises(ValueError, match=rf"{stage}: .*inside jax.shard_map.*state_specs"):
            getattr(optim, stage)(optax.sgd(0.1)).init(params)
    with pytest.raises(ValueError, match="shard_params: "):
        optim.shard_params(params)


def test_bad_arguments() -> None:
    params = make_params({"w": (8, 2), "b": (16,)})
    for stage in ("zero1", "zero2", "fsdp"):
        make = getattr(optim, stage)
        with pytest.raises(ValueError, match='reduce must be "mean" or "sum", got \'max\''):
            make(optax.sgd(0.1), reduce="max")
        with pytest.raises(ValueError, match=r"w: gradient \[3, 2\], parameter \[8, 2\]"):
            wrong = make_params({"w": (3, 2), "b": (16,)})
            trace(lambda p, g, make=make: make(optax.sgd(0.1)).update(g, (), p), False, params, wrong)
    with pytest.raises(ValueError, match="fsdp: update needs"):
        trace(lambda p: optim.fsdp(optax.sgd(0.1)).update(p, ()), False, params)
    with pytest.raises(ValueError, match=r"gather_params: .*\n  - w: \[8, 2\], expected \[1, 2\] of \[8, 2\]"):
        trace(lambda p: optim.gather_params({"w": p["w"]}, {"w": p["w"]}), False, params)


def test_extra_arguments_are_passed_on() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda u: u * value, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    params = make_params({"w": (8,)})

    def body(params: Any, value: Any) -> Any:
        wrapped = optim.zero2(tx, extra_args={"value": 0.0})
        return wrapped.update(params, wrapped.init(params), params, value=value)[0]

    mapped = jax.shard_map(body, mesh=make_mesh("data"), in_specs=P(), out_specs=P(), check_vma=False)
    np.testing.assert_allclose(fast_jit(mapped)(params, 3.0)["w"], 3 * params["w"], rtol=1e-6)
    with pytest.raises(ValueError, match=r"could not be traced .*'value'"):
        trace(optim.zero2(tx).init, False, params)
