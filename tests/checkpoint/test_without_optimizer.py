"""A layout without an optimizer reads the parameters of a saved run, and leaves the optimizer's state out."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxshard as js


def init_fn(key):
    return {"w": jax.random.normal(key, (16, 8)), "b": jnp.ones(7)}


def test_parameters_are_restored_alone_onto_a_layout_that_knows_no_optimizer(tmp_path):
    mesh, tx = js.make_mesh(data=8), optax.adam(1e-3)
    layout = js.layout(js.fsdp(min_size=0), mesh, init_fn, tx)
    run = js.init(init_fn, tx, layout, 0)
    js.save(tmp_path, run, layout)
    found = js.restore(tmp_path, js.layout(js.ddp(), mesh, init_fn))
    assert found.opt_state is None
    np.testing.assert_array_equal(found.params["w"], js.logical(run, layout).params["w"])
    with pytest.raises(ValueError, match=r"opt_state/0/mu/w: .* not in the layout"):
        js.restore(tmp_path, js.layout(js.ddp(), mesh, init_fn, optax.sgd(0.1)))
    with pytest.raises(TypeError, match="tx must be an optax GradientTransformation"):
        js.init(init_fn, None, layout, 0)
