"""The rules of the estimate on small programs: which results are stored, their types, and the peak."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.graph import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.peak import cut_parts_first, sizes_of

N = 128
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
BYTES = 4 * N * N


def analyze(fn, *args, tpu=True, role="parameters", donate=True):
    """The liveness of a function of arrays that every device has in full; its results are written into arguments."""
    region = build(jax.make_jaxpr(fn)(*args), [(((),) * len(x.shape), role, "") for x in args], {})
    elsewhere = set(region.outputs) if donate else set()
    return Liveness(region, sizes_of(tpu), tpu=tpu, elsewhere=elsewhere)


def live(fn, *args, **how):
    """The bytes of arrays of at least half a matrix that are live at the peak, largest first."""
    found = analyze(fn, *args, **how).peak()
    return sorted((one.bytes for one in found.live if one.bytes >= BYTES // 2), reverse=True)


def test_chains_of_elementwise_operations_are_computed_where_they_are_read():
    assert live(lambda x: jnp.sum(jnp.exp(x) * 2 + x), SQUARE) == []


def test_products_are_live_until_they_are_read_last():
    assert live(lambda x: ((x @ x) @ x) @ x, SQUARE) == [BYTES // 2] * 2  # in bf16, which only products read
    assert live(lambda x: ((x @ x) @ x) @ x, SQUARE, tpu=False) == [BYTES] * 2
    assert live(lambda x: x @ x, SQUARE, donate=False) == [BYTES]


def test_a_chain_that_a_kernel_reads_is_stored_once():
    assert live(lambda x: lax.cumsum(jnp.exp(x) * 2).sum(), SQUARE) == [BYTES] * 2


def test_a_product_computes_its_operand_on_tpus_and_reads_it_from_memory_on_gpus():
    def narrow(x, w):
        return (jnp.exp(x) @ w).sum()

    w = jax.ShapeDtypeStruct((N, 8), jnp.float32)
    assert live(narrow, SQUARE, w, tpu=True) == []
    assert live(narrow, SQUARE, w, tpu=False) == [BYTES]


def test_a_result_is_stored_if_several_operations_would_read_more_for_it():
    def twice(x, y):
        total = jnp.sin(x + y)
        return total.sum(axis=0), (total * 2).max(axis=1)

    def of_one(x):
        total = jnp.sin(x)
        return total.sum(axis=0), (total * 2).max(axis=1)

    assert live(twice, SQUARE, SQUARE) == [BYTES]
    assert live(of_one, SQUARE) == []  # reading x again costs as much


def test_a_product_writes_the_elementwise_operation_that_alone_reads_it():
    def activated(x):
        return lax.cumsum(jnp.sin(x @ x)).sum()

    def stored(tpu):
        found = analyze(activated, SQUARE, tpu=tpu)
        return [op.name for op in found.ops if not found.stored.isdisjoint(op.outs)]

    assert stored(tpu=True)[:2] == ["sin", "cumsum"]
    assert stored(tpu=False)[:3] == ["dot_general", "sin", "cumsum"]


@pytest.mark.parametrize(("precision", "size"), [(None, BYTES // 2), ("highest", BYTES)])
def test_arrays_that_only_products_read_are_stored_in_bf16_on_tpus_unless_they_multiply_f32(precision, size):
    def products(x):
        y = jnp.matmul(x, x, precision=precision)
        return jnp.matmul(y, y, precision=precision).sum()

    assert live(products, SQUARE)[-1] == size


def test_a_value_that_is_converted_to_a_smaller_type_by_all_readers_is_stored_in_it():
    def rows(x):
        return lax.cumsum(lax.cumsum(x).astype(jnp.bfloat16)).sum()

    assert live(rows, SQUARE, tpu=False) == [BYTES // 2] * 2


def test_a_scan_stacks_what_its_backward_pass_reads_and_adds_the_peak_of_its_body():
    def loss(w):
        def body(x, _):
            return jnp.sin(x @ w), None

        return lax.scan(body, jnp.ones((N, N)), length=5)[0].sum()

    stacked = [one for one in analyze(jax.grad(loss), SQUARE, tpu=False).peak().live if one.note == "stacked"]
    assert {one.bytes for one in stacked} == {5 * BYTES}

    def inside(w):
        return lax.scan(lambda x, _: ((x @ w) @ (w @ w), None), jnp.ones((N, N)), length=5)[0]

    assert len(live(inside, SQUARE, tpu=False)) == 3  # the carry, and in an iteration both products


def test_weights_that_a_loop_reads_in_bf16_are_converted_once_before_it_on_tpus():
    def blocks(weights, x):
        return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0].sum()

    args = jax.ShapeDtypeStruct((6, N, N), jnp.float32), SQUARE
    converted = [one for one in analyze(blocks, *args).peak().live if one.note == "converted"]
    assert [(one.value.dtype, one.bytes) for one in converted] == [(jnp.bfloat16, 6 * BYTES // 2)]
    assert not any(one.note == "converted" for one in analyze(blocks, *args, tpu=False).peak().live)


def test_a_loop_writes_its_carry_in_place_and_an_update_changes_its_operand():
    def loop(x):
        return lax.fori_loop(0, 3, lambda i, y: lax.dynamic_update_slice(y, y[:1] * 2, (i, 0)), lax.cumsum(x)).sum()

    assert live(loop, SQUARE) == [BYTES]


def test_an_elementwise_result_is_written_over_the_last_read_operand_of_its_size():
    def rows(x):
        return lax.cumsum(jnp.sin(lax.cumsum(x))).sum()

    assert live(rows, SQUARE) == [BYTES] * 2


def test_what_is_on_the_host_takes_nothing():
    def offloaded(x):
        away = jax.device_put(jnp.sin(lax.cumsum(x)), jax.memory.Space.Host)
        return lax.cumsum(jax.device_put(away, jax.memory.Space.Device)).sum()

    assert live(offloaded, SQUARE) == [BYTES] * 2  # and never three


def test_arrays_lie_in_donated_parameters_whose_parts_were_cut_first():
    """ZeRO: the parameter is read by the first product alone, and its memory is free until the new one is gathered."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, full = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("data"), P()))

    def step(w, x):
        part = lax.with_sharding_constraint(w, split)
        w, part = lax.optimization_barrier((w, part))
        y = lax.cumsum(x @ w)
        return lax.with_sharding_constraint(part * lax.cumsum(y).sum(), full)

    arguments = [(((), ()), role, "") for role in ("parameters", "batch")]
    region = build(jax.make_jaxpr(step)(SQUARE, SQUARE), arguments, dict(mesh.shape))
    cut_parts_first(region)
    sizes = []
    for donated in ({}, {region.outputs[0]: region.inputs[0]}):
        found = Liveness(region, sizes_of(True), tpu=True, elsewhere=set(region.outputs), donated=donated)
        sizes.append(found.peak().total)
    assert sizes[0] - sizes[1] == BYTES
