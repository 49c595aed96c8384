"""What a step's predicted peak is where the compiler computes values again, so that the step fits."""

import jax
import jax.numpy as jnp
import optax

import jaxshard as js

ROWS, WIDTH, DEPTH = 4096, 512, 6
KEPT = ROWS * WIDTH * 4
"""Bytes of one layer's activations."""


def init(key):
    return [jax.random.normal(key, (WIDTH, WIDTH)) for _ in range(DEPTH)]


def loss(params, batch, key):
    x = batch["x"]
    for matrix in params:
        x = jnp.sin(x @ matrix)  # whose gradient needs the product
    return js.Mean((x**2).sum(), x.size)


def in_a_loop(params, batch, key):
    x, _ = jax.lax.scan(lambda x, matrix: (jnp.sin(x @ matrix), None), batch["x"], jnp.stack(params))
    return js.Mean((x**2).sum(), x.size)


def predicted(usable, loss=loss):
    tx = optax.sgd(0.1)
    layout = js.layout(js.ddp(), js.plan.planned_mesh("v5e:2x2", data=4), init, tx)
    chip = js.plan.chip("TPU v5e")._replace(usable_bytes=usable, vmem_bytes=0)  # nothing lies on the chip
    batch = {"x": jax.ShapeDtypeStruct((4 * ROWS, WIDTH), jnp.float32)}
    return js.plan.predict(layout, loss, batch, js.explicit(), tx=tx, chip=chip)


def test_a_step_above_the_limit_is_brought_below_it():
    free = predicted(10**9)
    assert free.fits and free.peak.by_role["kept activations"] >= DEPTH * KEPT
    limit = free.peak.total - KEPT // 2
    lowered = predicted(limit)
    assert lowered.peak.total == free.peak.total - KEPT  # one product less
    assert lowered.fits is None  # the compiler has the last word


def test_a_step_that_recomputation_does_not_bring_below_the_limit_is_as_it_is():
    free = predicted(10**9)
    refused = predicted(free.argument_bytes + KEPT // 2)
    assert refused.fits is False and refused.peak == free.peak


def test_what_a_loop_keeps_is_not_computed_again():
    free = predicted(10**9, in_a_loop)
    assert predicted(free.peak.total - 1, in_a_loop).peak.total == free.peak.total
