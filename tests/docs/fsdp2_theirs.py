"""PyTorch's side of the table in docs/coming_from/fsdp2.md: each row's first cell, run by one process over gloo.

Torch is imported in the functions, since most environments of the tests have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

THEIRS: dict[str, Callable[[], None]] = {}

NOT_TORCH = {
    "torchtitan's `enable_fsdp_float8_all_gather`",
    "torchft's `LocalSGD`, `DiLoCo`",
}
"""Rows of packages that no extra installs."""


def row(text: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers the function of a row by the text of the row's first cell."""

    def register(fn: Callable[[], None]) -> Callable[[], None]:
        assert text not in THEIRS
        THEIRS[text] = fn
        return fn

    return register


@contextmanager
def process_group() -> Iterator[None]:
    """A group of one process, for all functions."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh(*names: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)


def model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def placements(module: Any) -> list[tuple[Any, ...]]:
    return [x.placements for x in module.parameters()]


@row('`init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))`')
def _():
    assert mesh("replicate", "shard").mesh_dim_names == ("replicate", "shard")


@row("`fully_shard(model)` over a 1D mesh")
def _():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    assert set(placements(fully_shard(model(), mesh=mesh("shard")))) == {(Shard(0),)}


@row("`fully_shard(model)` over a 2D mesh: copied over the first dimension, split over the second")
def _():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard

    made = fully_shard(model(), mesh=mesh("replicate", "shard"))
    assert set(placements(made)) == {(Replicate(), Shard(0))}


@row("`fully_shard(block)` for each block, so that one is gathered at a time")
def _():
    from torch.distributed.fsdp import FSDPModule, fully_shard

    made = model()
    for block in (made[0], made[2]):
        fully_shard(block, mesh=mesh("shard"))
    fully_shard(made, mesh=mesh("shard"))
    assert all(isinstance(one, FSDPModule) for one in (made, made[0], made[2]))


def run_resharding(reshard: bool) -> bool:
    """Whether a block's parameters are sharded after the forward pass."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    made = model()
    fully_shard(made[0], mesh=mesh("shard"), reshard_after_forward=reshard)
    fully_shard(made, mesh=mesh("shard"))
    made(torch.ones(2, 4))
    return isinstance(made[0].weight, DTensor)


@row("`reshard_after_forward=True`")
def _():
    assert run_resharding(True)


@row("`reshard_after_forward=False`")
def _():
    assert not run_resharding(False)


@row("`MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`")
def _():
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert fully_shard(model(), mesh=mesh("shard"), mp_policy=policy)(torch.ones(2, 4)).dtype == torch.bfloat16


@row("`DistributedDataParallel`")
def _():
    import torch
    from torch.nn.parallel import DistributedDataParallel

    assert DistributedDataParallel(model())(torch.ones(2, 4)).shape == (2, 4)


@row("`ZeroRedundancyOptimizer`")
def _():
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    tx = ZeroRedundancyOptimizer(model().parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    assert tx.param_groups[0]["lr"] == 0.1


@row("`set_requires_gradient_sync(False)`, `no_sync()`")
def _():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    fully_shard(model(), mesh=mesh("shard")).set_requires_gradient_sync(False)
    with DistributedDataParallel(model()).no_sync():
        pass


def distributed(placement: Any) -> Any:
    import torch
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(torch.ones(4, 2), mesh("shard"), [placement])


@row("`DTensor` with `Shard(0)`")
def _():
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(distributed(Shard(0)), DTensor)


@row("`Replicate()`")
def _():
    from torch.distributed.tensor import Replicate

    assert distributed(Replicate()).placements == (Replicate(),)


@row("`Partial()`")
def _():
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    x = DTensor.from_local(torch.ones(2), mesh("shard"), [Partial()])
    assert x.redistribute(placements=[Replicate()]).placements == (Replicate(),)


@row("`tensor.full_tensor()`")
def _():
    from torch.distributed.tensor import Shard

    assert distributed(Shard(0)).full_tensor().shape == (4, 2)


@row("`distribute_tensor(x, mesh, [Shard(0)])`")
def _():
    from torch.distributed.tensor import Shard

    assert distributed(Shard(0)).to_local().shape == (4, 2)


@row('`torch.device("meta")`, `to_empty`, `init_weights`')
def _():
    import torch
    from torch import nn

    with torch.device("meta"):
        made = model()
    made.to_empty(device="cpu").apply(lambda one: one.reset_parameters() if isinstance(one, nn.Linear) else None)
    assert made(torch.ones(2, 4)).isfinite().all()


@row('`parallelize_module(m, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})`')
def _():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made = parallelize_module(model(), mesh("tensor"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    # [out, in], the transpose of a kernel of Flax
    assert (made[0].weight.placements, made[2].weight.placements) == ((Shard(0),), (Shard(1),))


@row("`SequenceParallel()`")
def _():
    from torch import nn
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    assert parallelize_module(nn.LayerNorm(4), mesh("tensor"), SequenceParallel())


@row("`context_parallel(...)`")
def _():
    import torch
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(mesh("context"), buffers=[torch.ones(1, 4)], buffer_seq_dims=[1]):
        pass


@row("`Schedule1F1B`, `ScheduleInterleaved1F1B`, `ScheduleZBVZeroBubble`")
def _():
    import torch
    from torch.distributed import pipelining

    stage = pipelining.PipelineStage(model(), 0, 1, torch.device("cpu"))
    assert pipelining.Schedule1F1B(stage, n_microbatches=2)
    assert pipelining.ScheduleInterleaved1F1B and pipelining.ScheduleZBVZeroBubble


@row("`checkpoint_wrapper(block)`")
def _():
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    assert checkpoint_wrapper(model())(torch.ones(2, 4)).shape == (2, 4)


@row("`CPUOffloadPolicy`")
def _():
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    assert fully_shard(model(), mesh=mesh("shard"), offload_policy=CPUOffloadPolicy(pin_memory=False))


@row("`clip_grad_norm_(params, 1.0)`")
def _():
    import torch

    made = model()
    made(torch.ones(2, 4)).sum().backward()
    assert torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0) > 0


@row("`torch.distributed.checkpoint`")
def _():
    import torch
    import torch.distributed.checkpoint as dcp

    saved = {"w": torch.ones(3)}
    dcp.save(saved, checkpoint_id="theirs")
    read = {"w": torch.zeros(3)}
    dcp.load(read, checkpoint_id="theirs")
    assert torch.equal(read["w"], saved["w"])


@row("`torchrun --nproc-per-node 8`")
def _():
    from torch.distributed.run import get_args_parser

    assert get_args_parser().parse_args(["--nproc-per-node", "8", "train.py"]).nproc_per_node == "8"
