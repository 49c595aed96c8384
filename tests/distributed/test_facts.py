"""What processes compare: equal for equal programs, and readable where it differs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxshard as js
from jaxshard.distributed.facts import (
    batch_facts,
    key_fact,
    layout_text,
    program_text,
    row_facts,
    run_facts,
    shared_flags,
)


def init_fn(key):
    return {"w": jax.random.normal(key, (64, 512)), "b": jnp.zeros(512)}


def test_a_layout_has_a_line_per_array_and_another_strategy_differs_in_those_that_it_moves():
    tx, mesh = optax.sgd(0.1, momentum=0.9), js.make_mesh(data=8)
    texts = [layout_text(js.layout(strategy, mesh, init_fn, tx)) for strategy in (js.zero2("data"), js.fsdp("data"))]
    lines = [text.splitlines() for text in texts]
    assert len(lines[0]) == len(lines[1]) == 1 + 6
    assert [a.split()[:3] for a, b in zip(*lines, strict=True) if a != b] == [["param", "w", "float32[64,"]]


def test_what_is_compared_before_a_run_is_made():
    layout = js.layout(js.fsdp("data"), js.make_mesh(data=8), init_fn, optax.sgd(0.1))
    facts = run_facts(layout)
    assert facts["version of jax"] == jax.__version__ and facts["mesh"] == "data=8"
    assert facts["devices of the mesh"] == "0 1 2 3 4 5 6 7"
    turned = js.make_mesh(jax.devices()[::-1], data=8)
    other = run_facts(js.layout(js.fsdp("data"), turned, init_fn, optax.sgd(0.1)))
    assert [item for item in facts if facts[item] != other[item]] == ["devices of the mesh"]
    with jax.enable_x64(True):
        assert run_facts(layout)["setting jax_enable_x64"] != facts["setting jax_enable_x64"]


def test_flags_that_a_host_may_have_its_own_of_are_left_out():
    own = "--xla_dump_to=/tmp/host0 --xla_force_host_platform_device_count=8"
    assert shared_flags(f"--xla_b=1 {own} --xla_a=2") == shared_flags("--xla_a=2 --xla_b=1") == "--xla_a=2 --xla_b=1"


def test_a_seed_is_the_key_made_of_it():
    assert key_fact(jax.random.key(7)) == {"random key": "[0, 7] (threefry2x32)"}
    assert key_fact(jax.random.key(7, impl="rbg")) != key_fact(jax.random.key(7))


def test_batches_and_rows_in_words():
    batch = {"x": np.zeros((8, 3), np.float32), "scale": np.float32(1)}
    assert batch_facts(batch) == {"batch x": "float32[8, 3]", "batch scale": "float32[]"}
    rows = [row_facts({"tokens": np.arange(start, start + 8)}) for start in (0, 1, 0)]
    assert rows[0] == rows[2] != rows[1]
    assert "(0, 1, 2, 3, 4, 5, ...)" in rows[0]["first row of the data, tokens"]


def test_a_program_does_not_depend_on_the_folder_of_its_code():
    def text(file):
        space = {"jnp": jnp}
        exec(compile("\n" * len(file) + "def loss(x):\n    return jnp.tanh(x).sum()", file, "exec"), space)
        return program_text(jax.jit(space["loss"]).lower(jnp.ones(3)))

    assert text("/here/model.py") == text("/somewhere/else/model.py") and "tanh" in text("/here/model.py")
