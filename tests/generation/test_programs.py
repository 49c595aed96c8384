"""The compiled decode step: its collectives, and that a token costs the same at every position."""

import jax
import numpy as np
import pytest

import jaxshard as js
from jaxshard.hlo.found import collectives, summary
from tests.generation.cases import LLAMA, layout_of, likeliest, programs_of


def rows_of(found):
    return sorted((row.kind, row.axes, row.count, row.bytes) for row in summary(found))


def test_the_decode_step_gathers_weights_over_data_alone_and_never_moves_the_cache():
    model = js.models.llama(**LLAMA)
    layout = layout_of(model, "tensor")
    programs, weights, state, given = programs_of(model, layout, 4, 64)
    decode = programs.decode.lower(weights, state, given).compile()
    specs = {tuple(x.sharding.spec) for x in jax.tree.leaves(state.caches)}
    assert specs == {(None, "data", "tensor")} and state.caches.blocks[0].keys.shape == (2, 4, 4, 64, 4)
    for _ in range(9):
        state, _ = jax.block_until_ready(decode(weights, state, given))
    rows = np.asarray(state.tokens)[:, :13].tolist()
    assert rows == likeliest(model, [[1, 1, 1]], 10) * 4
    found = collectives(decode, layout.mesh)
    over_tensor = [c for c in found if "tensor" in c.axes]
    # Per device and step, of 2 rows: sums of x[2, 1, 16] after the embedding, attention and MLP of both blocks, and the
    # logits [2, 32].
    assert rows_of(over_tensor) == [("all-gather", ("tensor",), 1, 2 * 32 * 4), ("all-reduce", ("tensor",), 5, 640)]
    sizes = sum(x.size for x in jax.tree.leaves(layout.shapes.params))
    assert {c.kind for c in found if c.axes == ("data",)} == {"all-gather", "all-reduce"}
    assert sum(c.count * sum(c.sizes) for c in found if c.axes == ("data",) and c.kind == "all-gather") < 4 * sizes


@pytest.mark.slow
def test_a_token_costs_the_same_at_every_position_of_a_cache():
    model = js.models.llama(**LLAMA | {"seq": 1100})
    costs, programs = {}, None
    for size in (64, 1088):
        programs, weights, state, given = programs_of(model, layout_of(model, "one device"), 2, size)
        before = programs.decode._cache_size()
        for at in (10, 60, 1000):
            if at < size:
                state = state._replace(lengths=np.full(2, at, np.int32))
                cost = programs.decode.lower(weights, state, given).compile().cost_analysis()
                costs[size, at] = cost["flops"], cost["bytes accessed"]
                state, _ = programs.decode(weights, state, given)
        assert programs.decode._cache_size() == before + 1
    assert costs[1088, 10] == costs[1088, 1000] and costs[64, 10] == costs[64, 60]
    # More slots cost in proportion to them: the two products of attention, 2 rows x 4 heads x 4 wide, in a block.
    more = costs[1088, 10][0] - costs[64, 10][0]
    assert 2 * 2 * 2 * 4 * 4 * 1024 <= more <= 3 * 2 * 2 * 2 * 4 * 4 * 1024
