"""A transform mapped over stacked blocks equals the transform on the same model with its blocks in a list."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxshard import optim
from tests.toys import normal

from . import fast_jit

pytestmark = pytest.mark.fast_cases(1)

BLOCKS = 3


def arrays(seed: int, key: str = "blocks") -> Any:
    return {
        "embed": normal(seed, 5, 4),
        key: {
            "w": {"kernel": normal(seed + 100, BLOCKS, 4, 6), "bias": normal(seed + 200, BLOCKS, 6)},
            "scale": 1 + normal(seed + 300, BLOCKS),
        },
        "head": normal(seed + 400, 4, 5),
    }


def unstacked(tree: Any) -> Any:
    return tree | {"blocks": [jax.tree.map(lambda x, i=i: x[i], tree["blocks"]) for i in range(BLOCKS)]}


def by_shape(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "other", params)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


TRANSFORMS = {
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "muon": lambda: contrib.muon(0.1),
    "adafactor, factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.adam(0.1)),
    "partition": lambda: optax.partition({"matrix": optax.lamb(0.1), "other": optax.sgd(0.1)}, by_shape),
    "adam": lambda: optax.adam(0.1),
    "averaged": lambda: optim.averaged(optax.lamb(0.1), 0.9),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_equals_the_unstacked_model(name: str) -> None:
    """Parameters after three steps to 1e-5 of the largest."""
    plain = optax.with_extra_args_support(TRANSFORMS[name]())
    mapped = optim.per_block(plain)
    stacked, single = arrays(0), unstacked(arrays(0))

    @fast_jit
    def step(stacked: Any, state: Any, single: Any, other: Any, grads: Any) -> Any:
        updates, state = mapped.update(grads, state, stacked)
        singles, other = plain.update(unstacked(grads), other, single)
        return optax.apply_updates(stacked, updates), state, optax.apply_updates(single, singles), other

    state, other = mapped.init(stacked), plain.init(single)
    for number in range(3):
        stacked, state, single, other = step(stacked, state, single, other, arrays(number + 1))
    assert jax.tree.structure(stacked) == jax.tree.structure(arrays(0))
    for a, b in zip(jax.tree.leaves(unstacked(stacked)), jax.tree.leaves(single), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_paths_and_shapes_of_the_state() -> None:
    params = jax.eval_shape(lambda: arrays(0))
    state = jax.eval_shape(optim.per_block(optax.lamb(0.1)).init, params)
    shapes = {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(state)}
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        owners = [
            name for name, shape in shapes.items() if name.endswith(jax.tree_util.keystr(path)) and shape == x.shape
        ]
        assert len(owners) == 2, "mean and variance"


def test_another_key_and_abstract_masks() -> None:
    params = arrays(0, "layers")
    tx = optim.per_block(optax.masked(optax.lamb(0.1), jax.tree.map(lambda x: True, params)), "layers")
    updates = jax.eval_shape(lambda params: tx.update(params, tx.init(params), params)[0], params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def test_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no parameter under the key 'blocks', only \['embed', 'head', 'layers'\].*per_block\(tx, "
    ):
        optim.per_block(optax.lamb(0.1)).init(arrays(0, "layers"))
    with pytest.raises(ValueError, match="there are no parameters"):
        optim.per_block(optax.lamb(0.1)).init({})
    uneven = {"blocks": {"a": jnp.ones((3, 2)), "b": jnp.ones((4, 2)), "c": jnp.ones(())}}
    with pytest.raises(
        ValueError, match=r"stacked, 3 along dim 0 as blocks/a.*\n  - blocks/b: \[4, 2\]\n  - blocks/c: \[\]"
    ):
        optim.per_block(optax.lamb(0.1)).init(uneven)
    with pytest.raises(ValueError, match="random numbers, which would be the same in every block"):
        optim.per_block(optax.noisy_sgd(0.1, key=0)).init(arrays(0))


def test_rounding_at_random_goes_around_it() -> None:
    """Inside, every block would be rounded by the same bits; around it, a quarter of each block's elements moves."""
    match = r"put it around: js.optim.stochastic_round\(js.optim.per_block\(tx\)\)"
    with pytest.raises(ValueError, match=match):
        optim.per_block(optax.chain(optim.stochastic_round(optax.lamb(0.1)), optax.scale(1.0))).init(arrays(0))
    params = {"blocks": {"w": jnp.ones((2, 64, 64), jnp.bfloat16)}}
    tx = optim.stochastic_round(optim.per_block(optax.sgd(2**-10)))
    updates = fast_jit(lambda: tx.update(params, tx.init(params), params)[0])()
    one, two = np.asarray(updates["blocks"]["w"]) != 0
    assert abs(one.mean() - 0.25) < 0.04 and abs(two.mean() - 0.25) < 0.04 and abs((one & two).mean() - 1 / 16) < 0.02


@pytest.mark.parametrize(
    ("name", "tx"),
    [
        ("clip_by_global_norm", optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(0.1))),
        ("apply_if_finite", optax.apply_if_finite(optax.adam(0.1), 3)),
        ("prodigy", contrib.prodigy()),
        ("scale_by_dog", contrib.dog()),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_coupling_is_refused_by_name(name: str, tx: Any, alone: bool) -> None:
    """A transform that needs the other blocks, or the other parameters, has no update of one block by itself."""
    params = {"blocks": {"w": jnp.ones((3, 2, 2))}} if alone else arrays(0)
    with pytest.raises(ValueError, match=f"couples parameters.*: {name}: .*optax.chain"):
        optim.per_block(tx).init(params)


def test_extra_arguments() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **_: Any) -> Any:
        return jax.tree.map(lambda u: u * value, updates), state

    tx = optim.per_block(optax.GradientTransformationExtraArgs(lambda params: (), update))
    params = arrays(0)
    updates, _ = tx.update(params, optim.PerBlockState((), ()), params, value=2.0)
    jax.tree.map(lambda u, p: np.testing.assert_array_equal(u, 2 * p), updates, params)
