"""The TPU kernel, in Pallas's interpreter, against the formula; compiled for a TPU in test_attention.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.layers.attention.formula import Extras, Form, formula
from jaxshard.layers.attention.splash import splash, why_not_splash
from tests.layers.cases import arrays, assert_equal, documents

interpreted = partial(splash, interpret=True)


def test_a_length_that_blocks_do_not_divide():
    q, k, v = arrays(130, rows=1, heads=2, kv_heads=1, width=16)
    found = jax.jit(lambda q, k, v: interpreted(q, k, v, Extras(), Form(causal=True)))(q, k, v)
    np.testing.assert_allclose(found, formula(q, k, v, Extras(), Form(causal=True)), rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "extras", "form"),
    [
        ({"queries": 256, "width": 128}, Extras(), Form(causal=True)),
        ({"queries": 200, "kv_heads": 1, "width": 64}, Extras(), Form(causal=True, window=30)),
        ({"queries": 300, "keys": 140, "value_width": 24}, Extras(), Form()),
        ({"queries": 200}, Extras(segments=documents(2, 200)), Form(causal=True, soft_cap=5.0)),
        ({"queries": 200, "kv_heads": 4}, Extras(segments=documents(2, 200)), Form()),
        ({"queries": 256}, Extras(), Form(window=30)),
        ({"queries": 200}, Extras(), Form(window=30)),
    ],
    ids=["causal", "window", "cross", "segments", "both-ways", "local", "local-padded"],
)
def test_it_is_the_formula(sizes, extras, form):
    assert_equal(interpreted, *arrays(rows=2, **sizes), extras, form)


def test_what_it_refuses_is_named():
    q, _, _ = arrays(4)
    one = jnp.ones((1, 1, 4, 4))
    refused = {
        "a bias": (Extras(bias=one), Form()),
        "a mask": (Extras(mask=one > 0), Form()),
        "dropout": (Extras(keep=one > 0), Form()),
        "precision=highest": (Extras(), Form(precision="highest")),
    }
    for text, (extras, form) in refused.items():
        assert why_not_splash(q, extras, form).startswith(text)
    assert why_not_splash(q, Extras(segments=documents(2, 4)), Form(True, 3, 2.0)) == ""
