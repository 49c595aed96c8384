"""`js.lora` in several processes: the losses of one, a base that no checkpoint holds, and one export."""

import json

import pytest

from tests.distributed.launched import printed_together

PROGRAM = """
    import json, sys
    from pathlib import Path
    import jax
    address, index, count, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(index))
    import numpy as np
    import optax
    import jaxshard as js

    model = js.models.llama(vocab=64, width=32, depth=2, heads=4, kv_heads=2, hidden=64, seq=8)
    tuned = js.lora(model.init, model.loss, rank=2, match=["*_proj/kernel"], base="int8")
    tx, mesh = optax.adam(1e-2), js.make_mesh(data=8)
    layout = js.layout(js.fsdp("data", min_size=0), mesh, tuned.init, tx)
    rows = np.random.default_rng(0).integers(0, 64, (16, 9)).astype(np.int32)
    base = lambda: js.init(model.init, None, js.layout(js.fsdp("data", min_size=0), mesh, model.init), 7).params
    run = js.init(tuned.init, tx, layout, 0, init_from=base())
    step = js.make_step(tuned.loss, tx, layout, engine=js.explicit())
    batch = {"tokens": rows}
    losses = []
    for number in range(4):
        run, metrics = step(run, batch)
        losses.append(float(metrics["loss"]))
        if number == 1:
            js.save(folder + "/run", run, layout)
    again = js.restore(folder + "/run", layout, init_from=base())
    for _ in range(2):
        again, metrics = step(again, batch)
    js.hf.save(folder + "/tuned", run, layout)
    held = sum(x.stat().st_size for x in Path(folder, "run").rglob("*") if x.is_file())
    print(json.dumps({"losses": losses, "again": float(metrics["loss"]), "held": held}))
"""


def start(folder, processes):
    folder.mkdir()
    outputs = printed_together(PROGRAM, str(folder), count=processes)
    return [json.loads(next(line for line in out.splitlines() if line.startswith("{"))) for out in outputs]


@pytest.mark.slow
def test_two_processes_train_save_and_export_as_one_does(tmp_path):
    (alone,), both = start(tmp_path / "one", 1), start(tmp_path / "two", 2)
    assert both[0]["losses"] == both[1]["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert all(one["again"] == one["losses"][-1] for one in (alone, *both))
    files = [(tmp_path / name / "tuned" / "model.safetensors").stat().st_size for name in ("one", "two")]
    assert files[0] == pytest.approx(files[1], rel=0.01) and both[0]["losses"][-1] < both[0]["losses"][0]
