"""Policies of what a forward pass keeps: their names and values, the host's memory, and names that there are not."""

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxshard as js
from jaxshard.adapt import remat


def devices(platform, *kinds):
    """A mesh of one device with memories of these kinds."""
    memories = [SimpleNamespace(kind=kind) for kind in kinds]
    device = SimpleNamespace(platform=platform, device_kind="a stand-in", addressable_memories=lambda: memories)
    return SimpleNamespace(devices=np.array([device], dtype=object))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("all", r"remat must be one of 'nothing', 'dots', 'everything', a function .* got 'all'"),
        ({"qkv": "keep"}, r"each with 'save' .*, 'offload' .* or 'remat' \(compute it again\), got \{'qkv': 'keep'\}"),
        ({3: "save"}, r"remat takes names of activations, .* got \{3: 'save'\}"),
        ({"block_in": "remat"}, "'block_in' is what a block is computed again from, so it can't be 'remat'"),
    ],
)
@pytest.mark.parametrize("engine", [js.explicit, js.auto])
def test_policies_that_there_are_not(engine, policy, message):
    with pytest.raises(ValueError, match=message):
        engine(remat=policy)


def test_a_pipeline_refuses_an_offload():
    with pytest.raises(ValueError, match=r"stash: 'qkv' can't be offloaded: a pipeline keeps activations in rings on"):
        js.pipelined(microbatches=2, stash={"qkv": "offload", "attention_out": "save"})


def test_a_backend_without_host_memory_refuses_an_offload_by_name():
    policy = {"qkv": "offload", "mlp_hidden": "save"}
    with pytest.raises(ValueError, match=r"'qkv' can't be offloaded: a stand-in has no memory 'pinned_host' \(it"):
        remat.check_host_memory(policy, devices("gpu", "device", "other"))
    remat.check_host_memory(policy, devices("gpu", "device", "pinned_host"))
    remat.check_host_memory({"qkv": "save"}, devices("gpu", "device"))


def test_a_cpu_says_once_that_an_offload_saves_nothing():
    remat._warn_that_nothing_is_saved.cache_clear()
    with pytest.warns(UserWarning, match="on a CPU an offload saves nothing"):
        remat.check_host_memory({"qkv": "offload"}, devices("cpu", "device", "pinned_host"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        remat.check_host_memory({"qkv": "offload"}, devices("cpu", "device", "pinned_host"))


@jax.custom_vjp
def kernel(x):
    return x * x


def kernel_forward(x):
    return x * x, checkpoint_name(2 * x, "slope")


kernel.defvjp(kernel_forward, lambda slope, dy: (slope * dy,))


def test_names_are_found_in_loops_and_in_derivatives_of_ones_own():
    def model(w):
        step = jax.checkpoint(lambda x, _: (checkpoint_name(jnp.sin(x), "inner"), None))
        return jax.lax.scan(step, kernel(w), None, length=3)[0].sum()

    remat.check_names({"inner": "save", "slope": "save"}, model, jnp.ones(3))
    with pytest.raises(
        ValueError, match=r"no activation is named 'outer'; there are 'inner', 'slope'. Name one in the"
    ):
        remat.check_names({"inner": "save", "outer": "save"}, model, jnp.ones(3))
    with pytest.raises(ValueError, match=r"no activation is named 'a'; none is named. Name one"):
        remat.check_names({"a": "remat"}, lambda w: w, jnp.ones(3))
