"""Loaders of torch with real workers, and one for each of two processes, feed the steps that js.data.examples feeds."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.distributed.launched import printed_together

pytestmark = pytest.mark.slow

WORKERS = """
    import numpy as np
    import optax
    import torch
    import jaxshard as js


    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            return {"x": torch.full((4,), float(index))}


    def init_fn(key):
        return {"w": np.ones(4, np.float32)}


    def loss_fn(params, batch, key):
        return js.Mean((batch["x"] @ params["w"]).sum(), len(batch["x"]))


    if __name__ == "__main__":
        js.simulate_devices(8)
        tx = optax.sgd(0.0)
        layout = js.layout(js.ddp("data"), js.make_mesh(data=8), init_fn, tx)
        run, step = js.init(init_fn, tx, layout, 0), js.make_step(loss_fn, tx, layout)
        loader = torch.utils.data.DataLoader(
            Rows(), batch_size=8, drop_last=True, num_workers=2, multiprocessing_context="forkserver"
        )
        seen = []
        run = js.fit(run, step, js.batches(loader, layout), steps=4, callbacks=[seen.append])
        assert [float(one.metrics["loss"]) for one in seen] == [4 * (3.5 + 8 * number) for number in range(4)]
        print("done")
"""


def test_workers_of_a_forkserver_feed_fit(tmp_path: Path):
    pytest.importorskip("torch")
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(WORKERS))
    ended = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0 and ended.stdout.splitlines()[-1] == "done", ended.stderr


SAMPLER = """
    import json, sys
    import jax
    address, index, count = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    jax.distributed.initialize(address, int(count), int(index))
    import numpy as np
    import optax
    import torch
    import jaxshard as js

    layout = js.layout(js.ddp("data"), js.make_mesh(data=8), lambda key: {"w": np.ones(4, np.float32)}, optax.sgd(0.1))
    data = torch.utils.data.TensorDataset(torch.arange(32.0))
    sampler = torch.utils.data.DistributedSampler(
        data, num_replicas=jax.process_count(), rank=jax.process_index(), shuffle=False
    )
    collate = lambda rows: {"x": torch.stack([row for row, in rows])}
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    with js.local_batches(loader, layout) as batches:
        batch = next(batches)
    mine = [float(part.data[0]) for part in batch["x"].addressable_shards]
    print(json.dumps([batch["x"].shape[0], mine]))
"""


def test_a_distributed_sampler_in_each_process_makes_one_global_batch():
    pytest.importorskip("torch")
    outputs = printed_together(SAMPLER, count=2)
    found = [json.loads(out.splitlines()[-1]) for out in outputs]
    assert found == [[8, [0.0, 2.0, 4.0, 6.0]], [8, [1.0, 3.0, 5.0, 7.0]]]
