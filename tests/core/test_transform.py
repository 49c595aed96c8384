"""Whatever takes an optimizer says by name that it got something else."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxshard as js
from jaxshard.optim.parts import state_specs
from jaxshard.optim.tensor import tensor_state_specs

PARAMS = {"w": jax.ShapeDtypeStruct((4, 6), jnp.float32)}
SPECS = {"w": PartitionSpec(None, "tensor")}
TAKERS = {
    "zero1": js.optim.zero1,
    "zero2": js.optim.zero2,
    "fsdp": js.optim.fsdp,
    "master": js.optim.master,
    "averaged": lambda tx: js.optim.averaged(tx, 0.9),
    "per_block": js.optim.per_block,
    "tensor": lambda tx: js.optim.tensor(tx, "tensor", SPECS),
    "require_elementwise": lambda tx: js.optim.require_elementwise(tx, PARAMS),
    "state_specs": lambda tx: state_specs(tx, PARAMS, "data", 2),
    "tensor_state_specs": lambda tx: tensor_state_specs(tx, PARAMS, SPECS, js.make_mesh(jax.devices()[:2], tensor=2)),
}
WRONG = {
    "none": (None, "NoneType"),
    "number": (1e-3, "float"),
    "function": (optax.adam, r"the function adam: call it, adam\(\.\.\.\), if it makes one"),
    "state": (optax.EmptyState(), "EmptyState"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("taker", TAKERS)
def test_what_is_no_transform_is_named(taker, wrong):
    tx, got = WRONG[wrong]
    with pytest.raises(TypeError, match=f"must be an optax GradientTransformation such as .*, got {got}$"):
        TAKERS[taker](tx)
