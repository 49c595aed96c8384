"""What a compiled step communicates, against numbers written out: every array as often as the strategy promises.

Bytes, or elements on TPU, are of whole, unscattered arrays times trip counts, as one device sees them. On CPU all
collectives are f32: its compiler promotes the others.
"""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

import jaxshard as js
from jaxshard.compiler.topology import topology_mesh
from jaxshard.models.gpt import gpt
from tests.engines.programs import Program, elements, gpt_program, scalar_traffic, setups, torus_setups, tpu, traffic
from tests.toys import linen_toy, quick_compile

pytestmark = pytest.mark.fast_cases(1)

SIZES = {"vocab": 256, "width": 64, "depth": 3, "heads": 4, "seq": 16}

# A block has 12 x 64 x 64 weights and 13 x 64 biases and scales, 49,984 in all; three of them 149,952, the embeddings
# (256 + 16) x 64 = 17,408, the last layer norm 128: 167,488 parameters, 4 bytes each.
P = 669_952
# Backward gathers what backward needs: no added bias, 64 + 64 + 192 + 256 + 64 + 64 = 704 of a block, 8,448 bytes of
# three. All blocks twice without those, embeddings and head once: 2 x 599,808 - 8,448 + 70,144.
FSDP_GATHERS = 1_261_312

EXPECTED = {
    "ddp": {("all-reduce", "data"): 669_952},
    "zero1": {("all-reduce", "data"): 669_952, ("all-gather", "data"): 669_952},
    "zero2": {("reduce-scatter", "data"): 669_952, ("all-gather", "data"): 669_952},
    "fsdp": {("reduce-scatter", "data"): 669_952, ("all-gather", "data"): FSDP_GATHERS},
    # Shards of 4 devices are all-reduced over the copies: 669,952 / 4.
    "hsdp": {
        ("reduce-scatter", "data"): 669_952,
        ("all-reduce", "replica"): 167_488,
        ("all-gather", "data"): FSDP_GATHERS,
    },
}
# Loss and weight, 8 bytes; one sum of squares for each of 16 split gradients, 64 bytes; and for each of 16 parameters
# that are updated in parts the number of elements that the update spoiled, 64 bytes.
SCALARS = {
    "ddp": {("all-reduce", "data"): 8},
    "zero1": {("all-reduce", "data"): 72},
    "zero2": {("all-reduce", "data"): 136},
    "fsdp": {("all-reduce", "data"): 136},
    "hsdp": {("all-reduce", "replica+data"): 8, ("all-reduce", "data"): 128},
}


def program(strategy: str, engine: js.Explicit | None = None, *, min_size: int = 0, **options) -> Program:
    """The small GPT on 8 simulated devices, under the explicit engine unless another one is given."""
    axes, made = setups(min_size)[strategy]
    return gpt_program(js.make_mesh(**axes), made, engine or js.explicit(), **options, **SIZES)


def quick(*args, **options) -> Program:
    """The same, compiled in half the time: what the code generator leaves out makes no difference to collectives."""
    with quick_compile():
        return program(*args, **options)


@pytest.mark.parametrize("make", [quick, pytest.param(program, marks=pytest.mark.slow)], ids=["quick", "as users do"])
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "zero1", "zero2", "hsdp"])
def test_every_strategy_moves_what_it_promises(strategy, make):
    """With Adam, which is elementwise and adds nothing."""
    compiled = make(strategy)
    assert traffic(compiled) == EXPECTED[strategy]
    assert scalar_traffic(compiled) == SCALARS[strategy]


# Twice the blocks, forward and backward, in two turns: 2 x (2 x 599,808 - 8,448). What does not depend on the turn,
# embeddings and head, is gathered once: 70,144. The pass that sums the weights first gathers nothing.
TURNS_GATHERS = 2_452_480


@pytest.mark.slow
@pytest.mark.parametrize("scatter", ["each", "end"])
@pytest.mark.parametrize(
    ("strategy", "reduced", "gathers"),
    [("fsdp", "reduce-scatter", TURNS_GATHERS), ("zero2", "reduce-scatter", P), ("zero1", "all-reduce", P)],
)
def test_micro_batches(strategy, reduced, gathers, scatter):
    compiled = quick(strategy, js.explicit(microbatches=2, scatter=scatter))
    assert traffic(compiled) == {
        (reduced, "data"): 2 * P if scatter == "each" else P,
        ("all-gather", "data"): gathers,
    }
    assert scalar_traffic(compiled) == SCALARS[strategy]


# 13 -> 27 -> 1001 -> 7: 13 x 27 + 27 + 27 x 1001 + 1001 + 1001 x 7 + 7 = 35,420 elements; padded to 8 parts
# 13 x 32 + 32 + 27 x 1008 + 1008 + 1008 x 7 + 8 = 35,736, to 4 parts 13 x 28 + 28 + 27 x 1004 + 1004 + 1004 x 7 + 8 =
# 35,540; of 4 bytes each.
PADDED = {
    "ddp": {("all-reduce", "data"): 141_680},
    "zero1": {("all-reduce", "data"): 141_680, ("all-gather", "data"): 142_944},
    "zero2": {("reduce-scatter", "data"): 142_944, ("all-gather", "data"): 142_944},
    "hsdp": {("reduce-scatter", "data"): 142_160, ("all-reduce", "replica"): 35_540, ("all-gather", "data"): 142_160},
    # In two micro-batches: an opaque loss gathers everything once for both.
    "fsdp": {("reduce-scatter", "data"): 2 * 142_944, ("all-gather", "data"): 142_944},
}


@pytest.mark.parametrize("strategy", ["hsdp", "zero2", "fsdp", "ddp", "zero1"])
def test_padded_leaves_are_moved_padded(strategy):
    """By a loss without blocks and an optimizer without moments."""
    toy, tx = linen_toy(), optax.sgd(0.1)
    axes, made = setups(0)[strategy]
    layout = js.layout(made, js.make_mesh(**axes), toy.init_fn, tx)
    engine = js.explicit(microbatches=2 if strategy == "fsdp" else 1)
    compiled = js.make_step(toy.loss_fn, tx, layout, engine=engine).compile(toy.batch)
    assert traffic(Program(layout, compiled)) == PADDED[strategy]


def test_evaluation_gathers_everything_once():
    model, tx = gpt(**SIZES), optax.sgd(0.1)
    layout = js.layout(js.fsdp(min_size=0), js.make_mesh(data=8), model.init, tx)
    evaluate = jax.jit(js.make_eval_step(model.evaluate, layout))
    start = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), layout.shapes.params)
    run = js.init(model.init, tx, layout, 0, init_from=start)
    found = Program(layout, evaluate.lower(run, {"tokens": np.zeros((16, 17), np.int32)}).compile())
    assert traffic(found) == {("all-gather", "data"): P}
    assert sum(scalar_traffic(found).values()) <= 16


# On a torus the scatter along x sees whole gradients, the one along y the halves that it left; gathers the other way
# round. The sizes are such that every shard is made of whole tiles of 8 x 128, and leaves under 16,384 elements stay
# whole. Two blocks of 12 x 1024 x 1024 weights and 13 x 1024 others, embeddings of (1024 + 64) x 1024, 2 x 1024 at the
# end: 26,308,608 elements, of which 2 x 13 x 1024 + 2 x 1024 = 28,672 stay whole and 26,279,936 are split.
TORUS_SIZES = {"vocab": 1024, "width": 1024, "depth": 2, "heads": 8, "seq": 64}
SCATTERED = {("reduce-scatter", "x"): 26_279_936, ("reduce-scatter", "y"): 13_139_968, ("all-reduce", "x+y"): 28_672}
# Weights of blocks twice, embeddings once: 2 x 25,165,824 + 1,114,112; all split parameters are weights.
FORWARD_AND_BACKWARD = 51_445_760
TORUS = {
    "ddp": {("all-reduce", "x+y"): 26_308_608},
    "zero1": {("all-reduce", "x+y"): 26_308_608, ("all-gather", "x+y"): 26_279_936},
    "zero2": {**SCATTERED, ("all-gather", "x+y"): 26_279_936},
    "fsdp": {**SCATTERED, ("all-gather", "x"): FORWARD_AND_BACKWARD, ("all-gather", "y"): FORWARD_AND_BACKWARD // 2},
    "hsdp": {
        ("reduce-scatter", "y"): 26_279_936,
        ("all-reduce", "x"): 6_569_984,  # 26,279,936 / 4
        ("all-reduce", "x+y"): 28_672,
        ("all-gather", "y"): FORWARD_AND_BACKWARD,
    },
}

# As `SCALARS`, of the 6 parameters that are split.
TORUS_SCALARS = {
    "ddp": {("all-reduce", "x+y"): 8},
    "zero1": {("all-reduce", "x+y"): 32},
    "zero2": {("all-reduce", "x+y"): 56},
    "fsdp": {("all-reduce", "x+y"): 56},
    "hsdp": {("all-reduce", "x+y"): 8, ("all-reduce", "y"): 48},
}


def torus_program(strategy: str, engine: js.Explicit | None = None, *, min_size: int = 2**14, **sizes) -> Program:
    mesh = topology_mesh("v5e:2x4", x=2, y=4)
    sizes = TORUS_SIZES | sizes
    return gpt_program(mesh, torus_setups(min_size)[strategy], engine or js.explicit(), rows=8, **sizes)


def elements_but_for_borders(compiled: Program) -> dict[tuple[str, str], int]:
    """Fusions of all-reduce and slice are padded, and permutes move what lies across a border: under 1 % of P."""
    found = elements(compiled)
    permuted = sum(found.pop(key) for key in list(found) if key[0] == "collective-permute")
    assert permuted < 26_308_608 / 100
    return found


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("strategy", TORUS)
def test_every_strategy_on_a_torus(strategy):
    compiled = torus_program(strategy)
    assert elements_but_for_borders(compiled) == TORUS[strategy]
    assert scalar_traffic(compiled) == TORUS_SCALARS[strategy]
