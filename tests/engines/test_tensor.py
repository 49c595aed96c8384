"""Tensor axes: equal to one device (f32, loss 1e-6 relative, gradients 1e-5), and what the program communicates."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import pytest

import jaxshard as js
from jaxshard.compiler.topology import topology_mesh
from jaxshard.hlo.found import Collective, arrays_only, collectives
from tests.engines.programs import Program, gpt_program, tpu
from tests.toys import Trace, assert_equal_runs, one_device, recording_step, sharded, trained
from tests.zoo import GLOBAL_VIEW_ONLY, ZOO

DATA = {"tensor alone": None, "zero2": js.zero2(min_size=0), "fsdp": js.fsdp(min_size=0)}
ENGINES = {"auto": js.auto(), "explicit": js.explicit()}
FAST = ("gpt", 4, "fsdp", "explicit")


def cells():
    for model, parts, data, engine in itertools.product(ZOO, (2, 4, 8), DATA, ENGINES):
        alone = data == "tensor alone"
        if (engine == "explicit" and (model in GLOBAL_VIEW_ONLY or alone)) or (parts == 8 and not alone):
            continue
        cell = (model, parts, data, engine)
        yield pytest.param(*cell, marks=() if cell == FAST else pytest.mark.slow)


def setup(parts: int, data: str, rules=js.RULES) -> tuple[js.Strategy, jax.sharding.Mesh]:
    """The composed strategy and its mesh of 8 devices; without a data axis, of `parts` devices."""
    if DATA[data] is None:
        return js.tensor(rules), js.make_mesh(jax.devices()[:parts], tensor=parts)
    return js.compose(DATA[data], js.tensor(rules)), js.make_mesh(data=8 // parts, tensor=parts)


@cache
def reference(model: str) -> Trace:
    return one_device(ZOO[model]())


@pytest.mark.parametrize(("model", "parts", "data", "engine"), list(cells()))
def test_every_model_equals_one_device(model, parts, data, engine):
    toy = ZOO[model]()
    step = recording_step(toy, *setup(parts, data), ENGINES[engine])
    assert_equal_runs(trained(step, toy), reference(model))
    params = [p for p in step.layout.placed() if p.role == "param"]
    split = sum(p.leaf.size for p in params if "tensor" in str(p.placement.use))
    assert split >= 0.75 * sum(p.leaf.size for p in params)
    if (parts, data) == (4, "fsdp") and engine == ("auto" if model in GLOBAL_VIEW_ONLY else "explicit"):
        check_communication(model, step, toy)


SEQUENCE = [("sequence", "split"), *js.RULES]
SIZES = {"vocab": 96, "width": 64, "depth": 2, "heads": 8, "seq": 16}


def program(rules=js.RULES, engine=None, data=None, mesh=None, rows=16, **sizes) -> Program:
    mesh = js.make_mesh(data=2, tensor=4) if mesh is None else mesh
    strategy = js.compose(js.fsdp(min_size=0) if data is None else data, js.tensor(rules))
    return gpt_program(mesh, strategy, engine or js.explicit(), rows=rows, **(SIZES | sizes))


def over(axis: str, compiled: Program) -> list[Collective]:
    """Collectives of arrays over an axis, alone or with others."""
    return [one for one in arrays_only(collectives(compiled.compiled, compiled.mesh)) if axis in one.axes]


def totals(found: list[Collective]) -> dict[str, int]:
    """Elements per kind of collective."""
    sums: dict[str, int] = {}
    for one in found:
        assert one.count is not None
        size = sum(one.sizes) // (4 if one.dtype in ("f32", "s32") else 2)
        sums[one.kind] = sums.get(one.kind, 0) + one.count * size
    return sums


# Bytes of all-reduces over tensor=4 on each of two devices of the data axis: an activation of 4 rows of 8 positions of
# width 32 is 4,096 bytes (the GPT's of 8 rows of 16 positions 16,384), a number per label 128 or 512. Per block two
# forward and two backward, two more for embedding and last layer, three numbers per label. Where layers share their
# input the CPU compiler sums the gradients of each (the TPU's all at once): three for query, key and value instead of
# one, two for the gated MLP.
OVER_TENSOR = {
    "gpt": {"all-reduce": 10 * 16_384 + 3 * 512},
    "linen": {"all-reduce": 14 * 4_096 + 3 * 128},
    "nnx": {"all-reduce": 14 * 4_096 + 3 * 128},
    "tied": {"all-reduce": 14 * 4_096 + 3 * 128},
    "dropout": {"all-reduce": 14 * 4_096 + 3 * 128},
    "llama": {"all-reduce": 12 * 4_096 + 3 * 128},
    "experts": {"all-reduce": 4 * 4_096 + 5 * 128},
    # Activations that the next layer needs whole: 4 pictures of 8 x 8 pixels in 16 channels are 16,384 bytes.
    "resnet": {"all-reduce": 4 * 16_384 + 128, "all-gather": 8 * 16_384},
    # Hidden states and gates at each of 8 positions, which JAX 0.12 partitions a little otherwise.
    "lstm": {"all-reduce": 41_344, "all-gather": 41_472, "all-to-all": 12_288, "collective-permute": 27_648},
}


def check_communication(model, step, toy):
    """Over tensor no weight and no logits, and where blocks are pairs of layers all-reduces alone."""
    comparison = js.audit(step, toy.batch)
    assert not [one for one in comparison.surprises if "never" in str(one)]
    found = [one for one in arrays_only(comparison.found) if one.axes == ("tensor",)]
    kinds = {kind: 4 * size for kind, size in totals(found).items()}
    assert kinds == pytest.approx(OVER_TENSOR[model], rel=0.02 if model == "lstm" else 0)


TORUS = {"vocab": 2048, "width": 1024, "depth": 2, "heads": 8, "seq": 256}
ON_TPU = 4 * 256 * 1024  # four rows of 256 positions on each device


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["explicit", "auto"])
def test_a_block_on_a_tpu_costs_two_all_reduces_forward_and_two_backward(engine):
    """Without remat. Two more for the embedding, and three numbers per label for the loss."""
    mesh = topology_mesh("v5e:2x4", data=2, tensor=4)
    found = over("tensor", program(engine=ENGINES[engine], mesh=mesh, rows=8, **TORUS))
    large = [one for one in found if one.elements >= ON_TPU]
    assert totals(large) == {"all-reduce": (2 * 4 + 2) * ON_TPU}
    # The rest: numbers per label, and token ids under auto.
    assert all(one.elements <= 4 * 256 for one in found if one.elements < ON_TPU)


@tpu
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_sequence_parallelism_on_a_tpu_scatters_and_gathers_instead(engine):
    """The same volume: an all-reduce is a reduce-scatter and an all-gather.

    Each block two of both forward and two backward. Of the others, the embedding's output is scattered and its gradient
    gathered; what enters the last layer is gathered and its gradient scattered. Under `explicit` the compiler keeps
    what enters a layer split and gathers it again in the backward pass: two more per block.
    """
    mesh = topology_mesh("v5e:2x4", data=2, tensor=4)
    found = over("tensor", program(SEQUENCE, ENGINES[engine], mesh=mesh, rows=8, **TORUS))
    large = [one for one in found if one.elements >= ON_TPU]
    again = 2 * 2 if engine == "explicit" else 0
    assert totals(large) == {"all-gather": (2 * 4 + 2 + again) * ON_TPU, "reduce-scatter": (2 * 4 + 2) * ON_TPU}
    # Gradients of biases and norms are summed; nothing else is as large as a weight.
    assert all(one.elements <= 256 * 1024 for one in found if one.elements < ON_TPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "engine"),
    [(SEQUENCE, engine) for engine in ENGINES.values()]
    + [(js.RULES, js.explicit(microbatches=2, scatter=scatter)) for scatter in ("each", "end")],
    ids=["sequence, auto", "sequence, explicit", "micro-batches, each", "micro-batches, end"],
)
def test_sequence_parallelism_and_micro_batches_equal_one_device(rules, engine):
    """f32, loss 1e-6 relative, gradients 1e-5."""
    strategy, mesh = setup(4, "fsdp", rules)
    trace, _ = sharded(ZOO["gpt"](), strategy, mesh, engine)
    assert_equal_runs(trace, reference("gpt"))


@pytest.mark.slow
def test_bf16_weights_and_gradients_are_moved_over_data_alone():
    """In a nested shard_map: without one the CPU compiler aborts."""
    bf16 = jax.numpy.bfloat16
    compiled = program(engine=js.explicit(compute_dtype=bf16, reduce_dtype=bf16))
    assert set(totals(over("tensor", compiled))) == {"all-reduce"}
    assert {one.axes for one in over("data", compiled)} == {("data",)}
