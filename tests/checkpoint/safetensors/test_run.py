"""A whole run as bytes, out of one layout and onto another: bit for bit, or refused by name."""

import jax.numpy as jnp
import pytest

import jaxshard as js
from jaxshard.checkpoint.safetensors.header import decode_header
from jaxshard.core.tree import paths
from tests.checkpoint import small
from tests.checkpoint.runs import assert_same, made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("three", 8), ("zero1", 4)),
        (("fsdp", 8), ("pipeline", 4)),
        (("pipeline", 2), ("three", 8)),
        (("ddp", 1), ("tensor", 8)),
    ],
    ids=str,
)
def test_a_run_of_any_layout_comes_back_onto_any_other(source, target):
    one, other = made(*source), made(*target)
    raw = js.run_to_bytes(one.run(), one.layout, data={"epoch": 2})
    run, data = js.run_from_bytes(raw, other.layout)
    assert_same(run, other.run())
    assert data == {"epoch": 2}
    assert raw == js.run_to_bytes(run, other.layout, data=data), "the bytes do not depend on the layout"


def test_training_goes_on_as_if_nothing_had_been():
    step = small.step()
    run, losses = small.new_run(), []
    for number in range(4):
        if number == 2:
            raw = js.run_to_bytes(run, small.layout())
        run, metrics = step(run, small.BATCH)
        losses.append(float(metrics["loss"]))
    (back, data), again = js.run_from_bytes(raw, small.layout()), []
    assert int(back.step) == 2 and data is None
    for _ in range(2):
        back, metrics = step(back, small.BATCH)
        again.append(float(metrics["loss"]))
    assert again == losses[2:]
    assert_same(back, run)


@pytest.fixture(scope="module")
def raw():
    return js.run_to_bytes(small.at(3), small.layout(), data={"epoch": 2})


def test_the_bytes_are_a_safetensors_file_with_every_array_of_the_run(raw):
    header = decode_header(raw, len(raw))
    assert len(header.tensors) == len(paths(small.at(3))) and {"step", "key", "params/w", "opt_state/0/mu/w"} <= set(
        header.tensors
    )


def test_what_is_no_run_of_the_layout_is_named(raw):
    with pytest.raises(ValueError, match=r"they hold no run; js.from_bytes reads those of a model"):
        js.run_from_bytes(js.to_bytes(small.at(3), small.layout()), small.layout())
    with pytest.raises(ValueError, match=r"params/w: float32\[48, 24\], not in the layout"):
        js.from_bytes(raw, small.layout())

    _, other = small.placed(lambda key: {"w": jnp.zeros((48, 25))})
    with pytest.raises(ValueError, match=r"state/key: key<fry>.*, not in the layout"):
        js.run_from_bytes(raw, other)
    mine = js.run_to_bytes(*small.placed(lambda key: {"w": jnp.zeros((48, 24))}))
    with pytest.raises(ValueError, match=r"params/w: float32\[48, 24\], expected float32\[48, 25\]"):
        js.run_from_bytes(mine, other)


def test_what_can_not_be_saved_is_refused():
    with pytest.raises(ValueError, match="does not come back from JSON"):
        js.run_to_bytes(small.at(1), small.layout(), data=(1, 2))
    with pytest.raises(TypeError, match="TrainState"):
        js.run_to_bytes(small.at(1).params, small.layout())
