"""What a process holds on its host while it reads parts of tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshard.checkpoint.safetensors.parts import Range, Source, allocate, read_part


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_device_of_the_host_shares_a_large_part_that_was_read(tmp_path, dtype):
    """So a checkpoint is in memory once on simulated devices, and on others a part leaves the host when it is freed."""
    whole = np.arange(4 << 20).reshape(2048, 2048).astype(jnp.dtype(dtype))
    (tmp_path / "file").write_bytes(b"header" + whole.tobytes())
    part = read_part(Source(str(tmp_path / "file"), 6, dtype), whole.shape, [Range(1000, 2048), Range(0, 2048)])
    np.testing.assert_array_equal(part, whole[1000:])
    placed = jax.block_until_ready(jax.device_put(part, jax.devices()[0]))
    assert placed.unsafe_buffer_pointer() == part.ctypes.data
    doubled = jax.jit(lambda x: x + x, donate_argnums=0)(placed)  # what is shared is not written into
    np.testing.assert_array_equal(doubled, whole[1000:] + whole[1000:])
    np.testing.assert_array_equal(part, whole[1000:])


def test_small_and_empty_arrays_have_their_shapes():
    assert [allocate(shape, np.dtype("float32")).shape for shape in ([], [0, 3], [2, 5])] == [(), (0, 3), (2, 5)]
