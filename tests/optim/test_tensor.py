"""js.optim.tensor in a hand-written Megatron loop: a 2 x 4 mesh equals one device; contradictions are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxshard import optim
from jaxshard.hlo.found import collectives
from tests.toys import normal

from . import fast_jit

P = PartitionSpec
B, T, C, F, STEPS = 4, 8, 6, 16, 3
SPECS = {
    "norm": {"scale": P(), "bias": P()},
    "up": {"kernel": P(None, "tensor"), "bias": P("tensor")},
    "down": {"kernel": P("tensor"), "bias": P()},
    "gain": P(),
}
SPLIT = 2 * C * F + F
WHOLE = 3 * C + 1


def make_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def make_params() -> Any:
    return {
        "norm": {"scale": 1 + 0.3 * normal(0, C), "bias": jnp.zeros((C,))},
        "up": {"kernel": normal(1, C, F), "bias": normal(2, F)},
        "down": {"kernel": normal(3, F, C), "bias": normal(4, C)},
        "gain": jnp.asarray(0.7),
    }


def data(step: int) -> jax.Array:
    return normal(step, B, T, C)


def layer_norm(params: Any, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * params["scale"] + params["bias"]


def block(params: Any, x: jax.Array, enter: Any, leave: Any) -> jax.Array:
    """A norm, a column- and a row-parallel layer; `enter` and `leave` say what happens to activations in between."""
    h = enter(layer_norm(params["norm"], x))
    h = jnp.tanh(h @ params["up"]["kernel"] + params["up"]["bias"])
    return params["gain"] * x + leave(h @ params["down"]["kernel"]) + params["down"]["bias"]


def mean_loss(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(block(params, x, lambda h: h, lambda h: h) - jnp.roll(x, 1, -1)))


def sequence_parallel(params: Any, x: jax.Array) -> jax.Array:
    """This device's share of the loss: its positions; activations are split over them between the layers."""
    gather = partial(lax.all_gather, axis_name="tensor", axis=1, tiled=True)
    scatter = partial(lax.psum_scatter, axis_name="tensor", scatter_dimension=1, tiled=True)
    return jnp.mean(jnp.square(block(params, x, gather, scatter) - jnp.roll(x, 1, -1))) / 4


@jax.custom_vjp
def enter_columns(x: jax.Array) -> jax.Array:
    """Megatron's f: nothing forward, an all-reduce backward."""
    return x


enter_columns.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "tensor"),))


@jax.custom_vjp
def leave_rows(x: jax.Array) -> jax.Array:
    """Megatron's g: an all-reduce forward, nothing backward."""
    return lax.psum(x, "tensor")


leave_rows.defvjp(lambda x: (lax.psum(x, "tensor"), None), lambda _, g: (g,))


def whole_activations(params: Any, x: jax.Array) -> jax.Array:
    """The whole loss on every device of the tensor axis: whole parameters have whole gradients."""
    return jnp.mean(jnp.square(block(params, x, enter_columns, leave_rows) - jnp.roll(x, 1, -1)))


def transform(axis: Any) -> optax.GradientTransformation:
    """Clipping far below the norm of the gradients, then momentum."""
    clip = optax.clip_by_global_norm(0.5) if axis is None else optim.clip_by_global_norm(0.5, axis)
    return optax.chain(clip, optax.sgd(0.3, momentum=0.9))


def one_device() -> Any:
    tx, params = transform(None), make_params()

    @fast_jit
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        grads = jax.grad(mean_loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optim.global_norm(grads)

    state = tx.init(params)
    for number in range(STEPS):
        params, state, norm = step(params, state, data(number))
        assert norm > 1, "the clipping must matter"
    return jax.device_get(params)


@pytest.fixture(scope="module")
def expected() -> Any:
    return one_device()


def make_step(tx: Any, loss: Any, states: Any, *, check_vma: bool, rows: PartitionSpec, vary: tuple[str, ...]) -> Any:
    """(init, step) of the loop; gradients are taken with respect to parameters that vary over the axes `vary`."""

    def varying(path: Any, x: jax.Array) -> jax.Array:
        axes = tuple(axis for axis in vary if axis not in jax.typeof(x).mat.varying)
        return lax.pcast(x, axes, to="varying") if axes else x

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        seen = jax.tree_util.tree_map_with_path(varying, params) if check_vma else params
        updates, state = tx.update(jax.grad(loss)(seen, x), state, params)
        return optax.apply_updates(params, updates), state

    mapped = partial(jax.shard_map, mesh=make_mesh(), check_vma=check_vma)
    init = mapped(tx.init, in_specs=(SPECS,), out_specs=states)
    return fast_jit(init), fast_jit(mapped(step, in_specs=(SPECS, states, rows), out_specs=(SPECS, states)))


def used_on_split(path: str) -> bool:
    return path.startswith("norm/") or path in ("down/bias", "gain")


CASES = {
    # ZeRO over data inside; what is partial is named, or known from types where gradients vary over the axis, or
    # everything whole is summed by jax.grad already.
    "typed": (sequence_parallel, "zero2", True, None, ("data", "tensor")),
    "named": (sequence_parallel, "zero2", False, used_on_split, ("data",)),
    "typed and named": (sequence_parallel, "zero1", True, used_on_split, ("data", "tensor")),
    "summed by grad": (sequence_parallel, "zero2", True, None, ("data",)),
    "whole gradients": (whole_activations, "zero2", False, lambda path: False, ("data",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_data_and_a_tensor_axis_equal_one_device(case: str, expected: Any) -> None:
    """Parameters to 1e-5 after three steps of clipped momentum, ZeRO over the data axis inside."""
    loss, stage, check_vma, named, vary = CASES[case]
    zero = getattr(optim, stage)(transform("data"), "data")
    tx = optim.tensor(zero, "tensor", SPECS, partial=named)
    params = make_params()
    states = optim.tensor_state_specs(tx, params, SPECS, make_mesh(), zero_axis="data")
    rows = P("data", "tensor") if loss is sequence_parallel else P("data")
    init, step = make_step(tx, loss, states, check_vma=check_vma, rows=rows, vary=vary)
    state = init(params)
    for number in range(STEPS):
        params, state = jax.block_until_ready(step(params, state, data(number)))
    assert_close(params, expected)
    trace = state[1][0].trace
    assert trace["up"]["kernel"].addressable_shards[0].data.size == C * F // 8, "split over both axes"
    assert trace["norm"]["scale"].addressable_shards[0].data.size == C // 2
    assert_same_on_all_devices(params)


def test_collectives() -> None:
    """Partial gradients are all-reduced over the tensor axis, the others over data alone; norms cost two numbers."""
    tx = optim.tensor(optim.zero2(transform("data"), "data"), "tensor", SPECS, partial=used_on_split)
    params = make_params()
    states = optim.tensor_state_specs(tx, params, SPECS, make_mesh(), zero_axis="data")

    def update(grads: Any, state: Any, params: Any) -> Any:
        return tx.update(grads, state, params)

    specs = (SPECS, states, SPECS)
    mapped = jax.shard_map(update, mesh=make_mesh(), in_specs=specs, out_specs=(SPECS, states), check_vma=False)
    state = jax.eval_shape(jax.shard_map(tx.init, mesh=make_mesh(), in_specs=(SPECS,), out_specs=states), params)
    moved: dict[Any, int] = {}
    for found in collectives(fast_jit(mapped).lower(params, state, params).compile(), make_mesh()):
        moved[found.kind, found.axes] = moved.get((found.kind, found.axes), 0) + found.count * sum(found.sizes)
    assert moved == {
        ("all-reduce", ("tensor",)): 4 * WHOLE,
        ("reduce-scatter", ("data",)): 4 * (SPLIT // 4 + WHOLE - 1),
        ("all-gather", ("data",)): 4 * (SPLIT // 4 + WHOLE - 1),
        # The gradient of the scalar, and the squares of whole arrays; the scalar's own square needs none.
        ("all-reduce", ("data",)): 4 * 2,
        ("all-reduce", ("data", "tensor")): 4,
    }


# What is refused.


def trace(tx: Any, *, check_vma: bool, vary: tuple[str, ...] = (), specs: Any = SPECS, params: Any = None) -> None:
    """Traces one update inside shard_map."""

    def body(params: Any, x: jax.Array) -> Any:
        state = tx.init(params)
        seen = jax.tree.map(
            lambda p: lax.pcast(p, tuple(a for a in vary if a not in jax.typeof(p).mat.varying), to="varying"), params
        )
        updates, _ = tx.update(jax.grad(sequence_parallel)(seen, x), state, params)
        return jax.tree.map(lambda u: lax.psum(jnp.sum(u), ("data", "tensor")), updates)

    mapped = jax.shard_map(
        body, mesh=make_mesh(), in_specs=(specs, P("data", "tensor")), out_specs=P(), check_vma=check_vma
    )
    jax.eval_shape(mapped, make_params() if params is None else params, data(0))


def plain(**options: Any) -> Any:
    return optim.tensor(optax.sgd(0.1), "tensor", SPECS, **options)


def test_summed_gradients_that_are_named_partial_are_refused() -> None:
    message = r"named partial but already summed .*Leave partial out.*\n  - down/bias: does not vary over \('tensor',\)"
    with pytest.raises(ValueError, match=message):
        trace(plain(partial=used_on_split), check_vma=True)


def test_partial_gradients_that_are_not_named_are_refused_where_types_tell() -> None:
    with pytest.raises(ValueError, match=r"not named partial.*drift apart.*\n  - down/bias: varies over"):
        trace(plain(partial=lambda path: path.startswith("norm/")), check_vma=True, vary=("tensor",))


def test_without_types_partial_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"under check_vma=False types do not say.*partial=lambda path: False"):
        trace(plain(), check_vma=False)
    with pytest.raises(ValueError, match=r"only whole parameters can be partial.*\n  - up/kernel: split over tensor"):
        trace(plain(partial=lambda path: path == "up/kernel"), check_vma=False)
    with pytest.raises(ValueError, match="partial must be a function of the path or a tree of booleans"):
        trace(plain(partial={"norm": True}), check_vma=False)


def test_specs_that_do_not_fit_are_refused() -> None:
    lacking = {name: spec for name, spec in SPECS.items() if name != "gain"} | {"other": P()}
    with pytest.raises(ValueError, match=r"like the parameters\n  - gain: no spec\n  - other: a spec without a par"):
        trace(optim.tensor(optax.sgd(0.1), "tensor", lacking), check_vma=True)
    wrong = SPECS | {"norm": {"scale": P("tensor"), "bias": P()}}
    with pytest.raises(ValueError, match=r"by their specs these parameters are split.*\n  - norm/scale: does not vary"):
        trace(optim.tensor(optax.sgd(0.1), "tensor", wrong), check_vma=True)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "tx, name",
    [(optax.clip_by_global_norm(1.0), "clip_by_global_norm: reduce_sum"), (optax.lamb(0.1), "scale_by_trust_ratio")],
)
def test_transforms_that_are_not_elementwise_are_refused_by_name(tx: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*js.make_step"):
        trace(optim.tensor(tx, "tensor", SPECS), check_vma=True)
    with pytest.raises(ValueError, match=rf"{name}.*js.make_step"):
        trace(optim.tensor(optim.zero2(tx, "data"), "tensor", SPECS), check_vma=True)


def test_outside_of_shard_map() -> None:
    with pytest.raises(ValueError, match=r"tensor: .*inside jax.shard_map over the axis"):
        plain().init(make_params())


def assert_close(params: Any, expected: Any) -> None:
    """To 1e-5 of the larger of the leaf's and 1e-3 of the tree's largest magnitude."""
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(a) - b).max() <= 1e-5 * max(np.abs(b).max(), 1e-3 * largest)


def assert_same_on_all_devices(params: Any) -> None:
    """What is whole over an axis is the same on its devices, which check_vma=False leaves unproven."""
    for x in jax.tree.leaves(params):
        parts: dict[Any, Any] = {}
        for shard in x.addressable_shards:
            first = parts.setdefault(str(shard.index), np.asarray(shard.data))
            np.testing.assert_array_equal(np.asarray(shard.data), first)
