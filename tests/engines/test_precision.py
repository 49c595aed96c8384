"""Mixed precision in one word, under every engine; `test_dtypes_of_gathers_and_scatters` has what travels."""

import jax.numpy as jnp
import pytest

import jaxshard as js

MAKERS = {
    "auto": js.auto,
    "explicit": js.explicit,
    "pipelined": lambda **options: js.pipelined(microbatches=2, **options),
}


@pytest.mark.parametrize("name", MAKERS)
def test_other_dtypes_beside_it(name):
    make = MAKERS[name]
    assert make(precision="bf16") == make(compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16)
    assert make(precision="bf16", compute_dtype="bfloat16") == make(precision="bf16")
    assert make(precision="bfloat16") == make(precision="bf16")
    engine = make(precision="bf16", reduce_dtype=jnp.float32)
    assert engine.describe()["compute_dtype"] == "bfloat16" and engine.describe()["reduce_dtype"] == "float32"
    with pytest.raises(ValueError, match="computes in bfloat16, but got compute_dtype=float16 as well; leave one of"):
        make(precision="bf16", compute_dtype=jnp.float16)
    with pytest.raises(ValueError, match=r"precision must be 'bf16' or None.*, got 'fp8'"):
        make(precision="fp8")
    with pytest.raises(TypeError, match="compute_dtype must be a floating dtype"):
        make(precision="bf16", compute_dtype="nonsense")
