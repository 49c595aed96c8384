"""Checksums of a base: those of the logical arrays, whatever the layout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.core.placement import View
from jaxshard.training.base import _checksum, checksum_base

pytestmark = pytest.mark.fast_cases(1)

WHOLE = View((7, 5), (7, 5), (7, 5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_padding_and_the_order_of_a_pipeline_change_nothing_and_every_element_counts(dtype):
    x = (jax.random.normal(jax.random.key(0), (7, 5)) * 9).astype(dtype)
    expected = int(_checksum(x, WHOLE))
    for view in (
        View((7, 5), (7, 8), (7, 8)),
        View((7, 5), (8, 5), (2, 2, 2, 5), 2),
        View((7, 5), (8, 6), (4, 1, 2, 6), 2),
    ):
        assert int(_checksum(view.apply(x) + (1 - view.apply(jnp.ones_like(x))), view)) == expected
    others = {int(_checksum(x.at[i, j].add(1), WHOLE)) for i in (0, 3, 6) for j in range(5)}
    assert len(others) == 15 and expected not in others
    assert int(_checksum(x.at[jnp.array([0, 1])].set(x[jnp.array([1, 0])]), WHOLE)) != expected


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "bf16", "int8"])
def test_layouts_of_every_kind_have_one_checksum(base):
    model = js.models.llama(vocab=64, width=32, depth=3, heads=4, kv_heads=2, hidden=64, seq=8)
    tuned, tx = js.lora(model.init, model.loss, rank=2, match=["*_proj/kernel"], base=base), optax.adam(1e-3)
    pretrained = jax.device_get(model.init(jax.random.key(7)))
    cells = [
        (js.fsdp(min_size=0), {"data": 8}),
        (js.compose(js.fsdp(), js.tensor()), {"data": 4, "tensor": 2}),
        (js.compose(js.fsdp(min_size=0), js.pipeline(chunks=1)), {"data": 4, "pipe": 2}),
    ]
    sums = []
    for strategy, axes in cells:
        layout = js.layout(strategy, js.make_mesh(**axes), tuned.init, tx)
        run = js.init(tuned.init, tx, layout, 0, init_from=pretrained)
        sums.append(checksum_base(run.params, layout))
        merged = js.merge_lora(js.logical(run, layout).params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3 if base else 0), merged, pretrained)
    assert all(one == sums[0] for one in sums)
