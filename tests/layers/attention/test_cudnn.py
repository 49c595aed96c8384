"""What cuDNN takes, and what it is asked for; there is no GPU in the tests."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxshard.layers.attention import cudnn
from jaxshard.layers.attention.formula import Extras, Form
from tests.layers.cases import arrays, documents

H100 = SimpleNamespace(compute_capability="9.0", client=SimpleNamespace(platform_version="cuda 12090"))
HALF = [x.astype(jnp.bfloat16) for x in arrays(4)]


def test_what_it_takes():
    q, _, v = HALF
    for form in (Form(), Form(causal=True), Form(causal=True, window=3)):
        assert cudnn.why_not_cudnn(H100, q, v, Extras(), form) == ""
    assert not cudnn.is_rocm(H100)


@pytest.mark.parametrize(
    ("changes", "extras", "form", "text"),
    [
        ({"dtype": jnp.float32}, Extras(), Form(), "float32"),
        ({"width": 136}, Extras(), Form(), "heads of 136"),
        ({"width": 12}, Extras(), Form(), "heads of 12"),
        ({}, Extras(segments=documents(2, 4)), Form(), "segment_ids"),
        ({}, Extras(bias=jnp.ones((1, 1, 4, 4))), Form(), "a mask or a bias"),
        ({}, Extras(keep=jnp.ones((4, 4), bool)), Form(), "dropout"),
        ({}, Extras(), Form(soft_cap=1.0), "soft_cap"),
        ({}, Extras(), Form(window=3), "window"),
        ({}, Extras(), Form(precision="highest"), "precision=highest"),
    ],
)
def test_what_it_refuses_is_named(changes, extras, form, text):
    q, _, v = (x.astype(changes.get("dtype", jnp.bfloat16)) for x in arrays(4, width=changes.get("width", 8)))
    assert text in cudnn.why_not_cudnn(H100, q, v, extras, form)


def test_an_old_gpu_is_refused_by_its_compute_capability():
    old = SimpleNamespace(compute_capability="7.5")
    assert "7.5" in cudnn.why_not_cudnn(old, HALF[0], HALF[2], Extras(), Form())


def test_it_is_asked_for_jax_s_window(monkeypatch):
    asked = {}
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, **kwargs: asked.update(kwargs))
    cudnn.cudnn(*HALF, Extras(), Form(causal=True, window=3))
    assert asked == {"is_causal": True, "local_window_size": (2, 0), "implementation": "cudnn"}
