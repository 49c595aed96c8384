"""What is stored between the forward and the backward pass, and when the products of gradients run, on TPUs."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxshard.plan.memory.build import build
from jaxshard.plan.memory.liveness import Liveness
from jaxshard.plan.memory.order import join_scatters
from jaxshard.plan.memory.roles import temporary_bytes

ROWS, WIDTH, LARGE = 256, 128, 2**16
MATRIX = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)


def liveness(fn, *args, role="parameters", devices=1):
    """What is stored of a function whose arguments are split over so many devices along their first dimension."""
    closed = jax.make_jaxpr(fn)(*args)
    first = ("data",) if devices > 1 else ()
    region = build(closed, [((first, *((),) * len(x.shape[1:])), role, "") for x in args], {"data": devices})
    return Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)


def kept(fn, *args, shape, devices=1):
    """The bytes of what the forward pass of a gradient stores in a shape, in the order in which it is made."""
    found = liveness(jax.grad(fn, argnums=tuple(range(len(args)))), *args, devices=devices)
    return [
        found.stored_bytes(one)
        for op in found.ops
        for one in op.outs
        if one in found.stored and one.shard == shape and "transpose" not in one.path
    ]


def test_an_activation_that_f32_products_read_is_computed_by_each_of_them():
    # The activation's derivative reads h; the two products that read the activation compute it from h, too.
    def loss(x, w1, w2):
        h = x @ w1
        return jnp.sum((jnp.sin(h) @ w2) ** 2)

    shape = (ROWS, 2 * WIDTH)
    x, w1 = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((WIDTH, 2 * WIDTH), jnp.float32)
    w2 = jax.ShapeDtypeStruct((2 * WIDTH, WIDTH), jnp.float32)
    assert kept(loss, x, w1, w2, shape=shape) == [4 * ROWS * 2 * WIDTH]


def softmax_loss(q, k, v):
    return jnp.sum((jax.nn.softmax(q @ k.T) @ v) ** 2)


def test_large_attention_weights_are_computed_again_from_the_scores():
    # No product can write them, since a sum over the scores goes into them; both products compute them.
    tokens = 4096
    args = [jax.ShapeDtypeStruct((tokens, WIDTH), jnp.float32)] * 3
    assert kept(softmax_loss, *args, shape=(tokens, tokens)) == [4 * tokens * tokens]


@pytest.mark.parametrize("devices", [8, 1])
def test_what_is_multiplied_by_bf16_numbers_that_the_compiler_gathers_is_computed_by_each_product(devices):
    # A module of f32 widens such weights again.
    whole = NamedSharding(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), P())

    def widened(w):
        return lax.with_sharding_constraint(w.astype(jnp.bfloat16), whole).astype(w.dtype)

    def loss(x, w1, w2):
        y = x @ widened(w1)
        h = (y - y.mean(-1, keepdims=True)) * 3
        return jnp.sum((h @ widened(w2)) ** 2) + jnp.sum(y**3)

    x = jax.ShapeDtypeStruct((ROWS * devices, WIDTH), jnp.float32)
    assert kept(loss, x, MATRIX, MATRIX, shape=(ROWS, WIDTH), devices=devices) == [4 * ROWS * WIDTH]


@pytest.mark.parametrize("widened", [False, True])
def test_a_matrix_that_is_an_argument_is_converted_by_the_products_that_read_it(widened):
    # A module of f32 widens again what a step in bf16 converts.
    dtype = jnp.float32 if widened else jnp.bfloat16

    def loss(w, x):
        matrix = w.astype(jnp.bfloat16).astype(dtype)
        return jnp.sum(((x @ matrix) @ matrix).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((8, WIDTH), dtype)
    assert not any(one.shard == (WIDTH, WIDTH) for one in liveness(loss, MATRIX, x).stored)
    assert any(one.shard == (WIDTH, WIDTH) for one in liveness(loss, MATRIX, x, role="batch").stored)


def test_a_matrix_of_which_turns_multiply_slices_is_converted_whole_before_their_loop():
    # So are the parts of a table, if a loop makes logits: casts move before slices, and out of the loop.
    def logits(w, x, read):
        def turn(total, i):
            return total + x @ read(lax.dynamic_slice_in_dim(w, i * WIDTH, WIDTH)).T, None

        return 2 * lax.scan(turn, jnp.zeros((8, WIDTH)), jnp.arange(4))[0]

    w, x = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32), jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    for read, expected in ((lambda part: part, [jnp.bfloat16]), (jnp.sin, [])):
        found = liveness(lambda w, x, read=read: logits(w, x, read), w, x)
        assert [one.dtype for copies in found.copies.values() for one in copies if one.shard == w.shape] == expected


def test_a_product_that_is_converted_at_the_end_runs_where_it_frees_its_operands():
    # The gradients of a bf16 computation are cast to f32 in the end: two of the large products' results are enough.
    def step(x, *weights):
        def loss(weights, x):
            for w in weights:
                x = jnp.sin(x @ w)
            return jnp.sum(x.astype(jnp.float32))

        grads = jax.grad(loss)([w.astype(jnp.bfloat16) for w in weights], x)
        return [grad.astype(jnp.float32) for grad in grads]

    x = jax.ShapeDtypeStruct((LARGE, WIDTH), jnp.bfloat16)
    large = 2 * LARGE * WIDTH
    live = liveness(step, x, *[MATRIX] * 6).peak().live
    assert sum(one.bytes for one in live if one.bytes >= large) <= 8 * large


def test_a_sum_after_a_loop_is_no_part_of_a_product_before_it():
    # A tied table: the gradient of its use as output matrix is stored before the loop, and its operands are free then.
    def loss(table, w, tokens):
        def block(x, _):
            return jnp.sin(x @ w), None

        x, _ = lax.scan(block, table[tokens], length=3)
        return jnp.sum(jnp.sin(x @ table.T))

    table, tokens = jax.ShapeDtypeStruct((512, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    found = liveness(jax.grad(loss, argnums=(0, 1)), table, MATRIX, tokens)
    backward = [op for op in found.ops if op.name == "scan"][-1]
    product = next(op for op in found.ops if op.outs and op.outs[0].shard == (512, WIDTH) and op.name == "dot_general")
    assert found.place[product] < found.place[backward]
    assert product.outs[0] in found.stored


def test_logits_of_a_narrow_product_are_stored_in_f32_too_till_their_exponentials_are_summed():
    # The gradient of the softmax reads the narrow ones; each of the two products that need it computes it.
    def loss(x, w):
        logits = (x @ w).astype(jnp.float32)
        return (jax.nn.logsumexp(logits, axis=-1) - logits[:, 0]).sum()

    rows, vocab = 2048, 2**14
    x, w = jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((WIDTH, vocab), jnp.bfloat16)
    peak = liveness(jax.grad(loss, argnums=(0, 1)), x, w).peak()
    large = [one for one in peak.live if one.value.shard == (rows, vocab)]
    assert sorted(one.bytes for one in large) == [2 * rows * vocab, 4 * rows * vocab]
    assert not any("transpose" in one.value.path for one in large)


def test_a_narrow_product_that_is_read_in_f32_is_stored_as_it_is():
    def loss(x, w):
        y = (x @ w).astype(jnp.float32)
        return jnp.sum(jnp.sin(y) * jnp.exp(y))

    x, w = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16), jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    assert kept(loss, x, w, shape=(ROWS, WIDTH)) == [2 * ROWS * WIDTH]


def test_the_gradient_of_f32_logits_is_computed_by_each_that_reads_it_a_bias_too():
    def loss(x, w, bias):
        logits = x @ w + bias
        return (jax.nn.logsumexp(logits, axis=-1) - logits[:, 0]).sum()

    rows, vocab = 2048, 2**14
    x, w = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32), jax.ShapeDtypeStruct((WIDTH, vocab), jnp.float32)
    found = liveness(jax.grad(loss, argnums=(0, 1, 2)), x, w, jax.ShapeDtypeStruct((vocab,), jnp.float32))
    large = [one for op in found.ops for one in op.outs if one.shard == (rows, vocab) and one in found.stored]
    assert ["transpose" in one.path for one in large] == [False]


TIED, VOCAB, BLOCKS = 128, 1024, 3


def tied(table, weights, tokens, *, loop):
    x = table[tokens]
    if loop:
        x = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0]
    else:
        for i in range(BLOCKS):
            x = x + jnp.tanh(x @ weights[i])
    logits = (x @ table.T).astype(jnp.float32)
    return jnp.sum(jnp.sin(logits))


def products_behind_the_table(rows, *, loop):
    """Count the products and loops of the backward pass that run behind the product of the table's gradient."""
    args = (
        jax.ShapeDtypeStruct((VOCAB, TIED), jnp.bfloat16),
        jax.ShapeDtypeStruct((BLOCKS, TIED, TIED), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows,), jnp.int32),
    )
    closed = jax.make_jaxpr(jax.grad(lambda *args: tied(*args, loop=loop), argnums=(0, 1)))(*args)
    region = build(closed, [(((),) * len(one.shape), "", "") for one in args], {})
    join_scatters(region)
    live = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    late = [op for op in live.ops if op.name in ("dot_general", "scan") and "transpose" in op.path]
    (table,) = (i for i, op in enumerate(late) if op.name == "dot_general" and VOCAB in op.outs[0].shard)
    return len(late) - 1 - table


@pytest.mark.parametrize(("rows", "loop", "behind"), [(16, False, 0), (256, False, 2 * BLOCKS + 1), (16, True, 2)])
def test_the_gradient_of_a_table_that_is_looked_up_and_multiplied_is_left_to_the_end_if_it_makes_more_than_it_frees(
    rows, loop, behind
):
    assert products_behind_the_table(rows, loop=loop) == behind


@pytest.mark.parametrize(("over_devices", "wide"), [(True, 0), (False, 1)])
def test_a_sum_over_devices_is_widened_where_each_takes_its_part(over_devices, wide):
    # As under ZeRO-1 in bf16: all devices have the whole sum, and each updates its part.
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    summed = jax.shard_map(
        lambda x: (lax.psum(x[0], "data") if over_devices else lax.cumsum(x[0])).astype(jnp.float32),
        mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False,
    )  # fmt: skip

    def step(x):
        total = summed(x)
        part = lax.with_sharding_constraint(total, NamedSharding(mesh, P("data")))
        return jnp.sum(jnp.abs(total)), part * 2

    args = jax.ShapeDtypeStruct((8, WIDTH, WIDTH), jnp.bfloat16)
    region = build(jax.make_jaxpr(step)(args), [((("data",), (), ()), "batch", "")], {"data": 8})
    found = Liveness(region, lambda one: temporary_bytes(one, tiled=True), set(region.outputs), narrow_products=True)
    stored = [str(one.dtype) for one in found.stored if one.shard == (WIDTH, WIDTH) and one not in found.results]
    assert (stored.count("bfloat16"), min(1, stored.count("float32"))) == (1, wide)
