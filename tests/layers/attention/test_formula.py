"""The formula against JAX's own attention, and a loop over positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.layers.attention.formula import Extras, Form, formula
from tests.layers.cases import arrays, documents, normal

compiled = jax.jit(formula, static_argnums=4)


@pytest.mark.parametrize(("causal", "window"), [(True, 5), (False, 3)])
def test_it_is_jax_s_own(causal, window):
    q, k, v = arrays(12, heads=4, kv_heads=2)
    bias, mask = normal(4, 1, 4, 12, 12), normal(5, 2, 1, 12, 12) > -1
    sides = None if window is None else (window - 1, 0 if causal else window - 1)
    own = jax.jit(partial(jax.nn.dot_product_attention, is_causal=causal, local_window_size=sides))
    expected = own(q, k, v, bias, mask)
    found = compiled(q, k, v, Extras(bias=bias, mask=mask), Form(causal, window))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_segments_and_soft_cap_against_a_loop():
    q, k, v = arrays(9, rows=1, heads=2, kv_heads=1)
    ids = documents(1, 9)
    expected, (q_np, k_np, v_np, ids_np) = np.zeros((9, 2, 8)), map(np.asarray, (q, k, v, ids))
    for t in range(9):
        for head in range(2):
            seen = [s for s in range(t + 1) if ids_np[0, s] == ids_np[0, t]]
            logits = 3 * np.tanh(np.array([q_np[0, t, head] @ k_np[0, s, 0] for s in seen]) / 8**0.5 / 3)
            weights = np.exp(logits - logits.max())
            expected[t, head] = weights / weights.sum() @ v_np[0, seen, 0]
    found = compiled(q, k, v, Extras(segments=ids), Form(causal=True, soft_cap=3.0))
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)


def test_the_softmax_is_in_f32():
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays(64))
    exact = compiled(*(x.astype(jnp.float32) for x in (q, k, v)), Extras(), Form())
    found = compiled(q, k, v, Extras(), Form())
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=1e-2)
