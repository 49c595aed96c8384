"""Trains in one of several processes and prints all that came of it in hexadecimal: strategies as arguments."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence

import jax
import numpy as np
import optax

import jaxshard as js
from tests.engines.programs import setups
from tests.toys import TOYS, quick_compile


def train(toy_name: str, reduction: str, names: Sequence[str]) -> list[str]:
    """A line per strategy and device of this process: losses, norms and held-out losses, and a hash of its arrays."""
    toy, lines = TOYS[toy_name](), []
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    engine = js.explicit(reduction=reduction, microbatches=2)

    def loss_only(model, batch):
        return {"loss": toy.loss_fn(model, batch, None)}

    for name in names:
        axes, strategy = setups(0)[name]
        layout = js.layout(strategy, js.make_mesh(**axes), toy.init_fn, tx)
        run, numbers = js.init(toy.init_fn, tx, layout, 0), []
        with quick_compile():
            step = js.make_step(toy.loss_fn, tx, layout, engine=engine)
            for batch in js.batches([toy.batch] * 3, layout, prefetch=0):
                run, metrics = step(run, batch)
                numbers += [float(metrics["loss"]), float(metrics["grad_norm"])]
            eval_fn = toy.loss_fn.model.evaluate if toy_name == "gpt" else loss_only
            held_out = [toy.batch, jax.tree.map(lambda x: x[:11], toy.batch)]
            numbers.append(js.evaluate(js.make_eval_step(eval_fn, layout, engine=engine), run, held_out)["loss"])
        assert not metrics["bad"]
        hashes = {device: hashlib.sha256() for device in jax.local_devices()}
        for x in jax.tree.leaves((run.params, run.opt_state)):
            for shard in x.addressable_shards:
                hashes[shard.device].update(np.asarray(shard.data).tobytes())
        places = {device: place for place, device in enumerate(layout.mesh.devices.flat)}
        told = " ".join(number.hex() for number in numbers)
        lines += [f"{name} {places[device]} {hashes[device].hexdigest()} {told}" for device in hashes]
    return lines


if __name__ == "__main__":
    address, index, count, toy_name, reduction, *names = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 8 // int(count))
    if int(count) > 1:
        jax.distributed.initialize(address, int(count), int(index))
    print("\n".join(train(toy_name, reduction, names)), flush=True)
