"""`js.local` in two processes, a replica in each: the losses of one, and a run that goes on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launched import printed_together

PROGRAM = """
    import json, sys
    import jax
    address, index, count, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 4 // int(count))
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(index))
    import optax
    import jaxshard as js
    from tests.local_reference import MODEL, batches

    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    mesh = js.make_mesh(replica=2, data=2)
    strategy = js.compose(js.fsdp("data", min_size=0), js.local("replica", every=2))
    layout = js.layout(strategy, mesh, MODEL.init, tx)
    run = js.init(MODEL.init, tx, layout, jax.random.key(0))
    step = js.make_step(MODEL.loss, tx, layout, engine=js.explicit())
    losses, given = [], batches(5)
    for number, batch in enumerate(given):
        run, metrics = step(run, batch)
        losses.append(float(metrics["loss"]))
        if number == 2:
            js.save(folder, run, layout)
    again = js.restore(folder, layout)
    for batch in given[3:]:
        again, metrics = step(again, batch)
    print(json.dumps({"losses": losses, "again": float(metrics["loss"])}))
"""


def start(folder: Path, processes: int) -> list[dict[str, Any]]:
    outputs = printed_together(PROGRAM, str(folder), count=processes)
    return [json.loads(next(line for line in out.splitlines() if line.startswith("{"))) for out in outputs]


@pytest.mark.slow
def test_two_processes_train_and_go_on_as_one_does(tmp_path: Path) -> None:
    (alone,), both = start(tmp_path / "one", 1), start(tmp_path / "two", 2)
    assert both[0]["losses"] == both[1]["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert all(one["again"] == one["losses"][-1] for one in (alone, *both))
