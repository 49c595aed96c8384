"""js.hybrid: a mesh and the strategy over its axes."""

import jax
import pytest

import jaxshard as js


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ({"data": -1, "tensor": 2, "pipe": 2}, {"pipe": 2, "data": 2, "tensor": 2}),
        ({"data": 1, "tensor": -1, "pipe": 2}, {"pipe": 2, "data": 1, "tensor": 4}),
        ({"data": 2, "pipe": -1}, {"pipe": 4, "data": 2}),
        ({"pipe": 1}, {"pipe": 1, "data": 8}),
        ({"tensor": 8}, {"data": 1, "tensor": 8}),
        ({}, {"data": 8}),
    ],
)
def test_one_size_is_left_to_infer(asked, shape):
    mesh, strategy = js.hybrid(**asked)
    assert dict(mesh.shape) == shape
    assert [type(part).__name__ for part in strategy.parts if type(part).__name__ in ("Pipeline", "Tensor")] == [
        name for name, axis in (("Pipeline", "pipe"), ("Tensor", "tensor")) if axis in shape
    ]


def test_sizes_that_do_not_multiply_are_refused():
    with pytest.raises(ValueError, match="pipe=3, data=-1, tensor=2 leaves no size for 'data'"):
        js.hybrid(tensor=2, pipe=3)
    with pytest.raises(ValueError, match="at most one of them -1"):
        js.hybrid(data=-1, pipe=-1)


def test_some_devices_and_another_split():
    mesh, strategy = js.hybrid(jax.devices()[:4], pipe=2, split=js.zero1, chunks=4)
    assert dict(mesh.shape) == {"pipe": 2, "data": 2}
    assert strategy == js.compose(js.zero1("data"), js.pipeline("pipe", chunks=4))
