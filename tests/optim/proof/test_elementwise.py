"""`check_elementwise` against an experiment: does updating two halves of every array equal updating the whole?"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxshard import optim
from tests.optim import fast_jit
from tests.optim.proof.aliases import ALIASES, TYPICAL, WRAPPERS

pytestmark = pytest.mark.fast_cases(2)

ALL = ALIASES | WRAPPERS
SHAPES = {"w": (4, 6), "deep": {"b": (6,)}, "v": (3, 4)}
SPLIT = {"w": 0, "deep": {"b": 0}, "v": 1}


def arrays(seed: int, shapes: Any = SHAPES) -> Any:
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten([jax.random.normal(key, shape) for key, shape in zip(keys, leaves)])


def halves(tree: Any) -> list[Any]:
    parts = jax.tree.map(lambda x, dim: jnp.split(x, 2, axis=dim), tree, SPLIT)
    return [jax.tree.map(lambda _, part, which=which: part[which], tree, parts) for which in (0, 1)]


def is_elementwise_by_experiment(tx: Any) -> bool:
    """Whether updates of halves equal halves of the updates (1e-5), states included; the last gradient has a NaN."""
    tx = optax.with_extra_args_support(tx)

    @fast_jit
    def step(grads: Any, params: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def same(whole: jax.Array, first: jax.Array, second: jax.Array) -> bool:
        joined = [jnp.concatenate([first, second], dim) for dim in range(whole.ndim) if first.shape != whole.shape]
        pairs = [(whole, x) for x in joined if x.shape == whole.shape] or [(whole, first), (whole, second)]
        return all(a.shape == b.shape and np.allclose(a, b, 1e-5, 1e-5, equal_nan=True) for a, b in pairs)

    params = arrays(0)
    whole, parts = (params, tx.init(params)), [(part, tx.init(part)) for part in halves(params)]
    for number in range(4):
        grads = arrays(number + 1)
        if number == 3:
            grads["v"] = grads["v"].at[0, 0].set(jnp.nan)
        whole, parts = step(grads, *whole), [step(g, *part) for g, part in zip(halves(grads), parts)]
        if not all(map(same, *map(jax.tree.leaves, (whole, *parts)))):
            return False
    return True


@pytest.mark.parametrize("name", sorted(ALL, key=lambda name: name not in TYPICAL))
def test_the_check_agrees_with_the_experiment(name: str) -> None:
    try:
        truth = is_elementwise_by_experiment(ALL[name]())
    except (TypeError, ValueError):  # the halves have states that cannot be laid side by side
        truth = False
    report = optim.check_elementwise(ALL[name](), arrays(0))
    if report:
        assert truth, "a false elementwise"
        assert str(report) == "elementwise"
    else:
        assert not truth, f"a false alarm: {report}"
        assert report.reasons and all(reason.output and str(reason.source) for reason in report.reasons)


@pytest.mark.parametrize(
    "name", ["sgd", "momentum", "adam", "adamw", "lion", "rmsprop", "adagrad", "mask", "inject_hyperparams"]
)
@pytest.mark.parametrize("axis_name", [None, "data", ("x", "y")])
def test_recognised(name: str, axis_name: Any) -> None:
    params = arrays(0) | {"scalar": jnp.ones(()), "half": jnp.ones((3,), jnp.bfloat16)}
    for tx in (ALL[name](), optim.master(ALL[name]()), optim.averaged(ALL[name](), 0.9)):
        assert optim.check_elementwise(tx, params, axis_name=axis_name)


def test_what_cannot_be_traced_is_not_elementwise() -> None:
    for tx in (optax.lbfgs(), contrib.momo(0.1)):
        assert "could not be traced" in str(optim.check_elementwise(tx, arrays(0)))


def test_extra_arguments() -> None:
    assert not optim.check_elementwise(optax.polyak_sgd(0.1), arrays(0), extra_args={"value": 1.0}), "uses a norm"
    plateau = optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau())
    assert optim.check_elementwise(plateau, arrays(0), extra_args={"value": 1.0})
    times = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda u, s, p=None, *, by, **_: (jax.tree.map(lambda x: x * by, u), s)
    )
    assert optim.check_elementwise(times, {"w": jnp.ones(3)}, extra_args={"by": 2.0})
    assert "an extra argument is an array" in str(
        optim.check_elementwise(times, {"w": jnp.ones((3, 3))}, extra_args={"by": jnp.ones((1, 1))})
    )


# Single primitives and patterns, each a transform of its own.


def stateless(function: Any) -> Any:
    """A transform that maps a function over the updates."""
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates))


W = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}

ELEMENTWISE = {
    "where": lambda u: jnp.where(u > 0, u, 0.0),
    "nested jit": jax.jit(jax.jit(lambda u: jnp.clip(u, -1, 1) * 2)),
    "relu, custom_jvp": jax.nn.relu,
    "remat": jax.checkpoint(jnp.tanh),
    "scan": lambda u: jax.lax.scan(lambda c, x: (c * x, x), u, jnp.arange(3.0))[0],
    "fori": lambda u: jax.lax.fori_loop(0, 3, lambda i, c: c * i, u),
    "while": lambda u: jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (0, u))[1],
    "cond": lambda u: jax.lax.cond(jnp.float32(3) > 2, jnp.sin, jnp.zeros_like, u),
    "free arrays": lambda u: u * jnp.sum(jnp.arange(3.0) * jnp.array([1.0, 2.0, 5.0])),
    "random scalar": lambda u: u * jax.random.normal(jax.random.key(0)),
    "identity moves": lambda u: jnp.broadcast_to(jnp.reshape(u, u.shape), u.shape),
}
MIXING = {
    "sum": lambda u: u / jnp.sum(u),
    "row": lambda u: u / jnp.sum(u, axis=0, keepdims=True),
    "dot": lambda u: u @ u,
    "cumsum": lambda u: jnp.cumsum(u, axis=0),
    "sort": lambda u: jnp.sort(u, axis=0),
    "flip": lambda u: u[::-1],
    "transpose": lambda u: u.T,
    "transposing reshape": lambda u: jax.lax.reshape(u, u.shape, (1, 0)),
    "gather": lambda u: u[jnp.array([1, 0, 2, 3])],
    "concatenate": lambda u: jnp.concatenate([u[:2], u[2:]]),
    "iota": lambda u: u * jnp.arange(4.0),
    "constant array": lambda u: u * np.arange(16.0, dtype=np.float32).reshape(4, 4),
    "size": lambda u: u / u.size,
    "size by sum": lambda u: u / jnp.sum(jnp.ones_like(u)),
    "shape threshold": lambda u: u * 2 if u.shape[0] > 4 else u,
    "random bits": lambda u: u + jax.random.normal(jax.random.key(0), u.shape),
    "cond on data": lambda u: jax.lax.cond(jnp.sum(u) > 0, jnp.sin, jnp.cos, u),
    "while on data": lambda u: jax.lax.while_loop(lambda c: jnp.max(c) > 1, lambda c: c / 2, u),
    "scan over rows": lambda u: jax.lax.scan(lambda c, row: (c + row[0], row), 0.0, u)[1],
    "late in a loop": lambda u: jax.lax.fori_loop(0, 3, lambda i, c: (c[1], u * jnp.sum(c[0])), (u, u))[0],
    "svd": lambda u: jnp.linalg.svd(u)[0],
    "callback": lambda u: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), u.dtype), u[0, 0]) * u,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_patterns(name: str) -> None:
    assert optim.check_elementwise(stateless(ELEMENTWISE[name]), W)


@pytest.mark.parametrize("name", MIXING)
def test_mixing_patterns(name: str) -> None:
    assert not optim.check_elementwise(stateless(MIXING[name]), W)


def test_mixing_two_parameters() -> None:
    def swap(updates: Any, params: Any) -> Any:
        return {"a": updates["b"], "b": updates["a"]}

    two = {"a": jnp.ones((3,)), "b": jnp.ones((3,))}
    report = optim.check_elementwise(optax.stateless(swap), two)
    assert [reason.output for reason in report.reasons] == ["update a", "update b"]
    add = optax.stateless(lambda updates, params: {"a": updates["a"] + updates["b"], "b": updates["b"]})
    flat = optax.stateless(lambda updates, params: jax.tree.map(lambda u: jnp.float32(0), updates))
    assert "has shape (), which is not its parameter's" in str(optim.check_elementwise(flat, two))
    assert "mixes a, b (update a)" in str(optim.check_elementwise(add, two))
    scalars = {"a": jnp.ones(()), "b": jnp.ones(())}
    assert not optim.check_elementwise(add, scalars)
    assert optim.check_elementwise(add, scalars, axis_name="data"), "scalars are whole on every device"


def test_state() -> None:
    def make(init: Any, update: Any) -> Any:
        return optax.GradientTransformation(init, update)

    first = make(lambda p: jax.tree.map(jnp.sum, p), lambda u, s, p: (u, s))
    assert "state w" in str(optim.check_elementwise(first, W)), "an initial value that mixes"
    rows = make(lambda p: p["w"][0], lambda u, s, p: (u, s))
    assert "has shape (4,)" in str(optim.check_elementwise(rows, W))
    history = make(lambda p: jnp.zeros(3), lambda u, s, p: (u, jnp.roll(s, 1).at[0].add(1.0)))
    assert optim.check_elementwise(history, W), "an array of its own, the same on all devices"
    losses = make(lambda p: jnp.zeros(3), lambda u, s, p: (u, s.at[0].set(jnp.sum(u["w"]))))
    assert not optim.check_elementwise(losses, W)
    grows = make(lambda p: (), lambda u, s, p: (u, (s, 1)))
    assert "tree" in str(optim.check_elementwise(grows, W))


def test_scalars_alone() -> None:
    one = {"s": jnp.ones(())}
    assert optim.check_elementwise(optax.clip_by_global_norm(1.0), one)
    assert not optim.check_elementwise(optax.clip_by_global_norm(1.0), one | {"w": jnp.ones(2)})


def test_sums_over_the_axis() -> None:
    params = arrays(0) | {"scalar": jnp.ones(())}

    def with_norm(norm: Any) -> Any:
        return optax.stateless(lambda u, p: jax.tree.map(lambda x: x / norm(jax.tree.leaves(u)), u))

    def squares(leaves: Any) -> Any:
        return sum(jnp.sum(x**2) for x in leaves if x.ndim)

    psum = jax.lax.psum
    right = with_norm(lambda leaves: jnp.sqrt(psum(squares(leaves), "data")))
    wrong = {
        "root before the sum": lambda leaves: psum(jnp.sqrt(squares(leaves)), "data"),
        "mean over devices": lambda leaves: psum(squares(leaves), "data") / jax.lax.axis_size("data"),
        "scalars counted on every device": lambda leaves: psum(sum(jnp.sum(x**2) for x in leaves), "data"),
        "a constant added on every device": lambda leaves: psum(squares(leaves) + 1.0, "data"),
        "padding not zero": lambda leaves: psum(sum(jnp.sum((x + 1) ** 2) for x in leaves if x.ndim), "data"),
        "a sum of rows": lambda leaves: psum(jnp.sum(leaves[-1], axis=0), "data")[0],
        "no sum over devices": squares,
        "the device": lambda leaves: 1.0 + jax.lax.axis_index("data"),
        "a maximum": lambda leaves: jax.lax.pmax(jnp.max(leaves[-1]), "data"),
    }
    assert optim.check_elementwise(right, params, axis_name="data")
    assert not optim.check_elementwise(right, params, axis_name=("data", "model")), "summed over one of two axes"
    for name, norm in wrong.items():
        assert not optim.check_elementwise(with_norm(norm), params, axis_name="data"), name
    with pytest.raises(ValueError, match=r"unbound axis name: data.*Pass the axis .* as axis_name="):
        optim.check_elementwise(right, params)


def test_clipping_on_shards() -> None:
    params = arrays(0) | {"scalar": jnp.ones(())}
    clip = optim.clip_by_global_norm(1.0, "data")
    fine = [
        optax.chain(clip, optax.adamw(0.1)),
        optax.chain(optax.clip(0.5), clip, optax.sgd(0.1)),
        optax.chain(optax.adamw(0.1), clip),  # zero padding gives zero moments and a zero update
        optax.chain(optax.adagrad(0.1), clip),
        optax.MultiSteps(optax.chain(clip, optax.adam(0.1)), 2).gradient_transformation(),
        optim.master(optim.averaged(optax.chain(clip, optax.adam(0.1)), 0.9)),
    ]
    for tx in fine:
        assert optim.check_elementwise(tx, params, axis_name="data")
    nan = optax.chain(optax.scale_by_rms(eps=0.0), clip)  # 0 / 0 in the padding
    assert "padding" in str(optim.check_elementwise(nan, params, axis_name="data"))
    shifted = optax.chain(optax.stateless(lambda u, p: jax.tree.map(lambda x: x + 1, u)), clip)
    assert "padding" in str(optim.check_elementwise(shifted, params, axis_name="data"))
    drifting = optax.chain(
        optax.add_decayed_weights(0.1), clip, optax.stateless(lambda u, p: jax.tree.map(lambda x: x - 1, u))
    )
    assert "padding" in str(optim.check_elementwise(drifting, params, axis_name="data")), (
        "parameters drift in the padding"
    )


def test_names_in_the_error() -> None:
    params = {"a": {"w": jnp.ones((2, 2))}, "b": jnp.ones(2)}
    tx = optax.chain(optax.adam(0.1), optax.clip_by_global_norm(1.0))
    with pytest.raises(
        ValueError,
        match=r"not elementwise: clip_by_global_norm: reduce_sum at optax/transforms/_clipping.py:\d+ mixes elements "
        r"of a/w \(update a/w, update b\)\. Use js\.make_step.*js\.optim\.clip_by_global_norm\(max_norm, axis_name=",
    ):
        optim.require_elementwise(tx, params)
    optim.require_elementwise(optax.adam(0.1), params)


def test_a_cached_function_is_not_blamed_for_an_earlier_caller() -> None:
    @jax.jit
    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(x**2))

    def first() -> Any:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return jax.tree.map(lambda x: x / norm(x), updates), state

        return optax.GradientTransformation(lambda params: (), update)

    def second() -> Any:
        def update(updates: Any, state: Any, params: Any = None) -> Any:
            return jax.tree.map(lambda x: x * norm(x), updates), state

        return optax.GradientTransformation(lambda params: (), update)

    for make in (first, second):
        assert {reason.source.transform for reason in optim.check_elementwise(make(), W).reasons} == {make.__name__}


def test_views() -> None:
    params = {"w": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
    assert optim.check_elementwise(optax.adam(0.1), params, views={"w": jax.ShapeDtypeStruct((8, 3), jnp.float32)})
    flat = {"w": jax.ShapeDtypeStruct((24,), jnp.float32)}
    assert optim.check_elementwise(optax.adam(0.1), params, views=flat)
    masked = ALL["mask"]()
    assert optim.check_elementwise(masked, params)
    assert not optim.check_elementwise(masked, params, views=flat), "weight decay by the number of dimensions"
    with pytest.raises(ValueError, match="same tree"):
        optim.check_elementwise(optax.sgd(0.1), params, views={"v": params["w"]})


def test_a_result_that_is_chosen_by_shape_is_seen() -> None:
    """Both traces have the same equations (none), but one returns the gradient and the other the state."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g, s: g if g.shape[0] > 4 else s, grads, state), state

    tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    report = optim.check_elementwise(tx, {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32)})
    assert not report and "depends on the shape of the parameters" in str(report)


def test_a_bitcast_that_adds_a_dimension_gives_other_bytes_along_it() -> None:
    def by_bytes(u: jax.Array) -> jax.Array:
        return u * jax.lax.bitcast_convert_type(jnp.sqrt(jnp.float32(2)), jnp.uint8).astype(u.dtype)

    assert not optim.check_elementwise(stateless(by_bytes), {"w": jax.ShapeDtypeStruct((4,), jnp.float32)})
    same_width = stateless(lambda u: jax.lax.bitcast_convert_type(u, jnp.int32).astype(u.dtype))
    assert optim.check_elementwise(same_width, W)


def test_inside_a_traced_function() -> None:
    """Hyperparameters that are traced values of the surrounding program are numbers like any others."""

    def step(params: Any, rate: jax.Array) -> Any:
        assert optim.check_elementwise(optax.sgd(rate), params)
        assert not optim.check_elementwise(stateless(lambda u: u * params["w"]), params), "an array from outside"
        return params

    jax.eval_shape(step, W, jax.ShapeDtypeStruct((), jnp.float32))
