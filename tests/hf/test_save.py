"""How `js.hf.save` moves arrays; what it writes is compared with transformers in test_transformers.py."""

import pytest

import jaxshard as js


@pytest.mark.slow
def test_a_tensor_stays_split_as_its_array_is(tmp_path, capfd):
    """The tensor of q_proj is [heads * width of a head, inputs] and its array is split over inputs, of equal size.

    XLA's partitioner warns where it can change the split of an array only by copying all of it to every device.
    """
    model = js.models.llama(vocab=16, width=16, depth=1, heads=4, kv_heads=4, hidden=16, seq=8)
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=8), model.init)
    run = js.init(model.init, None, layout, 0)
    js.hf.save(tmp_path / "saved", run, layout)
    assert "full rematerialization" not in capfd.readouterr().err
