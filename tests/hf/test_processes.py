"""Several processes load and save together, and each reads the bytes that its devices hold."""

import numpy as np
import pytest

from jaxshard.checkpoint.safetensors.reader import open_files
from jaxshard.storage.paths import as_path
from tests.distributed.launched import printed_together
from tests.hf.checkpoints import all_of, draw, write_folder

PROGRAM = """
    import os, sys
    import jax
    address, index, count, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    jax.distributed.initialize(address, int(count), int(index))
    import optax
    import jaxshard as js
    from jaxshard.checkpoint.safetensors import parts

    read, preadv = [0], os.preadv
    def counted(*args):
        got = preadv(*args)
        read[0] += got
        return got
    parts.os.preadv, read_range = counted, parts.read_range
    def counted_range(*args):
        got = read_range(*args)
        read[0] += len(got.content)
        return got
    parts.read_range = counted_range
    import jaxshard.hf.load as load
    parts.least_run = load.least_run = lambda file: 1  # the model is small: its runs are, too

    model = js.hf.model(folder)
    layout = js.layout(js.fsdp("data", min_size=0), js.make_mesh(data=8), model.init, optax.sgd(1.0))
    params = js.hf.load(folder, layout)
    held = sum(part.data.nbytes for x in jax.tree.leaves(params) for part in x.addressable_shards)
    run = js.init(model.init, optax.sgd(1.0), layout, 0, init_from=params)
    js.hf.save(folder + "/saved", run, layout, max_bytes=20_000)
    print("read", read[0], held)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "place"), [("gemma2", "tmp_path"), ("phi3", "tmp_path"), ("phi3", "bucket")])
def test_processes_read_their_share_and_write_together(case, place, tmp_path, request):
    folder = as_path(request.getfixturevalue(place))
    for file in list(write_folder(tmp_path, case).iterdir()):
        (folder / file.name).write_bytes(file.read_bytes())
    outputs = printed_together(PROGRAM, str(folder), count=2)
    counts = [line.split()[1:] for output in outputs for line in output.splitlines() if line.startswith("read ")]
    assert len(counts) == 2
    assert all(int(read) == int(held) for read, held in counts), counts
    found, problems = open_files(folder / "saved" / "model.safetensors")
    assert not problems and found
    assert all(np.array_equal(all_of(one), draw(name, one.tensor.shape)) for name, one in found.items())
