"""Check that replicated arrays are equal bit by bit on all devices: `js.check_replicas`, `js.ReplicaWatch`.

A layout replicates an array over the mesh axes that do not split it: `js.ddp` everything, ZeRO-1 and ZeRO-2 the
parameters, `js.hsdp` each shard once per group, `js.fsdp` arrays too small to be split, the step number and the random
key. Nothing in a training step compares these copies. A bit that flips in one copy, or a device or host that computes
a wrong value, goes unnoticed and spreads.

Here each device adds up the bits of its own copies (`checks/bit_sums.py`) to a checksum of 32 bits for each array:

    array                   device 0    device 1    device 2    device 3
    params/w     replicated 83a1..      83a1..      71c0..      83a1..      device 2 differs from the other 3
    opt/0/mu/w   2 groups   02d4..      91be..      02d4..      91be..      0 with 2, 1 with 3: equal

The program that does so has no collective. In one process the host reads the checksums of all devices. With several
processes each has only those of its own devices, so a second program gathers them: 4 bytes for each array and device.
An array with a single copy is not read.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshard.checks.bit_sums import bit_sum
from jaxshard.core.counts import check_count
from jaxshard.core.layout import Layout, check_layout
from jaxshard.core.mesh import axis_size
from jaxshard.core.placement import axes_of
from jaxshard.core.settings import own_settings, with_own_settings
from jaxshard.core.tree import Leaf, bytes_of, leaf_of
from jaxshard.distributed.agree import peers_of
from jaxshard.distributed.watchdog import waits_for_devices
from jaxshard.training.state import TrainState, check_run, run_shapes

_LISTED = 12
"""The number of arrays that an error names; on a broken device all may differ."""


class Difference(NamedTuple):
    """Copies of one array, or of one shard of it, that are not equal.

    Attributes:
      leaf: the array: its path in the TrainState ("params/head/kernel"), stored shape and dtype.
      copies: the devices that hold it, in the order of the mesh.
      differ: the devices whose copy differs from the majority; all devices if there is no majority, as with two copies.
    """

    leaf: Leaf
    copies: tuple[jax.Device, ...]
    differ: tuple[jax.Device, ...]


class ReplicasDiffer(RuntimeError):
    """Copies of an array that must be equal are not, so a device or a host computed or kept something wrong.

    The message names each array, and the devices (with process and host) whose copies differ from the majority. If
    there are two copies both are named, because nothing tells which one is right. The run cannot be continued:
    gradients of later steps come from all copies. Start again from a checkpoint of the step `clean` or an earlier one.

    Attributes:
      differences: a tuple of (leaf, copies, differ): the array, all devices that hold it, and the devices that differ.
      step: the number of the step after which the difference was found, or None if it is not known.
      clean: the last step after which all copies were found equal, or None.

    Example:
        try:
            js.check_replicas(run, layout)
        except js.ReplicasDiffer as error:
            for leaf, copies, differ in error.differences:
                print(leaf.path, [device.id for device in differ])
    """

    exit_status = 1

    def __init__(self, differences: Sequence[Difference], text: str, step: int | None, clean: int | None):
        super().__init__(text)
        self.differences, self.step, self.clean = tuple(differences), step, clean


@with_own_settings
def check_replicas(run: TrainState, layout: Layout) -> None:
    """Raise unless all copies of every replicated array are equal, bit by bit.

    Every process calls it with the same run. A change of a single element is always found. A change of several elements
    is missed with a probability of 2**-32 (`checks/bit_sums.py`). Only copies are compared: an array that is wrong in
    the same way on all devices is not found, nor an array with a single copy. `js.ReplicaWatch` does the same during
    `js.fit`.

    Each device reads its copies once. In several processes 4 bytes for each array and device are gathered. The first
    call for a layout compiles. The call waits until the arrays of the TrainState are computed.

    Args:
      run: a TrainState with this layout; it is not donated.
      layout: the layout of the TrainState.

    Raises:
      ReplicasDiffer: copies differ; the arrays and devices are named.
      ValueError: the arrays are not those of the layout, or were donated; every leaf that differs is named.
      TypeError: `run` is no TrainState.

    Example:
        run = js.init(init_fn, tx, layout, 0)
        js.check_replicas(run, layout)
    """
    check_run(layout, run)
    sums = _make_sums(layout.mesh, list_watched(layout))
    if _one_at_a_time(layout.mesh):
        jax.block_until_ready(run)
    differences = sums.find(sums.start(run))
    is_known = all(one.leaf.path != "step" for one in differences)
    raise_differences(differences, layout.mesh, int(run.step) if is_known else None, None)


class ReplicaWatch:
    """A callback of `js.fit` that compares the copies of replicated arrays, and ends training if they differ.

    Every `every` steps it does the same as `js.check_replicas`. On accelerators a comparison starts after the step and
    is read one step later, so that devices never wait for Python; on a CPU it runs between two steps. At the end of
    `js.fit` the last run is compared.

    Put it before a `js.Checkpointer`, with an `every` that divides the steps between saves: on a CPU each TrainState is
    then compared just before it is saved. On accelerators the result comes one step later, so a wrong step may have
    been saved: restore the step that the error calls clean, or call `wait()` before the save.

        on_run=[watch, lambda step, run: watch.wait(), checkpointer]

    Args:
      layout: the layout of the TrainState that `js.fit` passes.
      every: the number of steps from one comparison to the next.

    Raises:
      ValueError: `every` is less than 1.

    Attributes:
      clean: the last step after which all copies were found equal, or None.
      arrays: the number of replicated arrays in the TrainState.
      bytes: the bytes that each device reads for a comparison.

    Example:
        watch = js.ReplicaWatch(layout, every=10)
        run = js.fit(run, step, batches, steps=1000, on_run=[watch])
        print(watch.clean)     # 1000
    """

    def __init__(self, layout: Layout, *, every: int = 10):
        check_layout("js.ReplicaWatch(layout)", layout)
        check_count("ReplicaWatch", every=every)
        self._layout, self._every = layout, every
        self._watched = list_watched(layout)
        self._sums: BitSums | None = None
        self._pending: tuple[int, jax.Array] | None = None
        self.arrays = len(self._watched)
        self.bytes = sum(one.bytes for one in self._watched)
        self.clean: int | None = None

    def __call__(self, step: int, run: TrainState) -> None:
        """Compare the copies of the arrays of `run` if `every` divides `step`, the number of the step just taken.

        Raises:
          ReplicasDiffer: copies differ, in this comparison or in an earlier one whose result is read now.
          ValueError: the arrays of `run` are not those of the layout.
        """
        self.wait()
        if step % self._every == 0:
            self._compare(step, run)

    def ended(self, run: TrainState) -> None:
        """Compare the last run, unless it was found equal already; `js.fit` calls this before it is saved.

        Raises:
          ReplicasDiffer: copies differ.
        """
        self.wait()
        if self.clean != (step := int(run.step)):
            self._compare(step, run)
            self.wait()

    def _compare(self, step: int, run: TrainState) -> None:
        """Start a comparison; on a CPU also read its result."""
        with own_settings(self._layout.mesh):
            if self._sums is None:
                check_run(self._layout, run)
                self._sums = _make_sums(self._layout.mesh, self._watched)
            is_late = not _one_at_a_time(self._layout.mesh)
            if not is_late:
                jax.block_until_ready(run)
            self._pending = step, self._sums.start(run)
        if not is_late:
            self.wait()

    def wait(self) -> None:
        """Wait for the comparison in progress, if there is one, and read its result.

        Raises:
          ReplicasDiffer: copies differ.
        """
        if self._pending is None:
            return
        assert self._sums is not None
        (step, rows), self._pending = self._pending, None
        raise_differences(self._sums.find(rows), self._layout.mesh, step, self.clean)
        self.clean = step

    def finish(self, error: BaseException | None = None) -> None:
        """Read the result of the last comparison, unless an error ended training; `js.fit` calls this at its end."""
        if error is None:
            self.wait()
        self._pending = None


class Watched(NamedTuple):
    """An array of a TrainState that has copies: several devices have the full array, or the same shard.

    Attributes:
      number: its index in `jax.tree.leaves(run)`.
      leaf: its path in the TrainState, stored shape and dtype.
      spec: its PartitionSpec.
      bytes: the bytes of one device's copy.
    """

    number: int
    leaf: Leaf
    spec: PartitionSpec
    bytes: int


def list_watched(layout: Layout) -> tuple[Watched, ...]:
    """List the arrays of a TrainState that have copies: several devices have the full array, or the same shard."""
    found = []
    for number, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(run_shapes(layout))):
        if axis_size(layout.mesh, axes_of(x.sharding.spec)) < layout.mesh.size:
            size = bytes_of(x.sharding.shard_shape(x.shape), x.dtype)
            found.append(Watched(number, leaf_of(path, x), x.sharding.spec, size))
    return tuple(found)


class BitSums:
    """The compiled program in which each device computes a checksum of each of its copies.

    All processes of the mesh create it at the same time: each waits for the others before the program first runs.

    Args:
      mesh: the mesh.
      watched: the replicated arrays.

    Attributes:
      program: the compiled program (watched arrays) -> uint32[devices, arrays], a row on each device.
      gather: the compiled program that gathers these rows on every device; None in one process.
    """

    def __init__(self, mesh: Mesh, watched: tuple[Watched, ...]):
        self._mesh, self._watched = mesh, watched
        self.program = sums_program(mesh, watched).compile()
        self.gather = None
        if (peers := peers_of(mesh)) is not None:
            # A separate program: a compiler that saw where the rows come from could take them to be equal.
            rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            shape = jax.ShapeDtypeStruct((mesh.size, len(watched)), jnp.uint32, sharding=rows)
            replicated = NamedSharding(mesh, PartitionSpec())
            self.gather = jax.jit(lambda rows: rows, out_shardings=replicated).lower(shape).compile()
            peers.meet("js.check_replicas, compiled")

    def start(self, run: TrainState) -> jax.Array:
        """Start to compute the checksums of a TrainState, uint32[devices, arrays]; return them without waiting."""
        leaves = jax.tree.leaves(run)
        rows: jax.Array = self.program([leaves[one.number] for one in self._watched])
        if self.gather is not None:
            if _one_at_a_time(self._mesh):
                jax.block_until_ready(rows)
            rows = self.gather(rows)
        rows.copy_to_host_async()
        return rows

    @waits_for_devices
    def find(self, rows: jax.Array) -> list[Difference]:
        """Wait for the checksums `rows` that `start` returned, and return the copies that differ."""
        return find_differences(self._mesh, self._watched, jax.device_get(rows))


def sums_program(mesh: Mesh, watched: tuple[Watched, ...]) -> jax.stages.Lowered:
    """Lower the program that computes checksums: (watched arrays) -> uint32[devices, arrays], without collectives."""
    rows = PartitionSpec(mesh.axis_names)
    arrays = [
        jax.ShapeDtypeStruct(one.leaf.shape, one.leaf.dtype, sharding=NamedSharding(mesh, one.spec)) for one in watched
    ]

    def on_each_device(arrays: list[jax.Array]) -> jax.Array:
        return jnp.stack([bit_sum(x) for x in arrays])[None] if arrays else jnp.zeros((1, 0), jnp.uint32)

    # Each device on its own copy: outside of shard_map the compiler may take copies for equal, and use one of them.
    specs = [one.spec for one in watched]
    mapped = jax.shard_map(on_each_device, mesh=mesh, in_specs=(specs,), out_specs=rows, check_vma=False)
    return jax.jit(mapped, out_shardings=NamedSharding(mesh, rows)).lower(arrays)


@functools.lru_cache(maxsize=16)
def _make_sums(mesh: Mesh, watched: tuple[Watched, ...]) -> BitSums:
    """Compile the checksum program, once for all layouts with equal replicated arrays."""
    return BitSums(mesh, watched)


def _one_at_a_time(mesh: Mesh) -> bool:
    """Return True on a CPU, whose simulated devices starve each other if two programs run at the same time."""
    return bool(mesh.devices.flat[0].platform == "cpu")


def find_differences(mesh: Mesh, watched: Sequence[Watched], rows: np.ndarray) -> list[Difference]:
    """Find the copies of arrays that differ, by comparing their checksums.

    Args:
      mesh: the mesh.
      watched: the replicated arrays.
      rows: the checksums uint32[devices, arrays], devices in the order of the mesh.

    Returns:
      One difference for each array, or each shard of it, whose copies differ, in the order of `watched`.
    """
    devices = mesh.devices.reshape(-1)
    groups = {spec: copy_groups(mesh, spec) for spec in {one.spec for one in watched}}
    found = []
    for number, (_, leaf, spec, _) in enumerate(watched):
        sums = rows[:, number][groups[spec]]
        for row in np.flatnonzero((sums != sums[:, :1]).any(axis=1)):
            holders = devices[groups[spec][row]]
            value, count = Counter(sums[row].tolist()).most_common(1)[0]
            is_odd = sums[row] != value if 2 * count > len(holders) else np.ones(len(holders), bool)
            found.append(Difference(leaf, tuple(holders), tuple(holders[is_odd])))
    return found


def copy_groups(mesh: Mesh, spec: PartitionSpec) -> np.ndarray:
    """Return the devices that have each shard of an array: int[shards, copies], indices in `mesh.devices.flat`."""
    splits = [mesh.axis_names.index(axis) for axis in axes_of(spec)]
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    shards = math.prod(mesh.devices.shape[axis] for axis in splits)
    return np.moveaxis(positions, splits, range(len(splits))).reshape(shards, -1)


def raise_differences(differences: Sequence[Difference], mesh: Mesh, step: int | None, clean: int | None) -> None:
    """Raise `ReplicasDiffer` if `differences` is not empty; the message names the arrays and devices.

    `step` is the step after which copies were compared, `clean` the last step after which they were equal.
    """
    if not differences:
        return
    after = "" if step is None else f"after step {step} "
    shown = [_describe(one, mesh) for one in differences[:_LISTED]]
    if len(differences) > _LISTED:
        shown.append(f"and {len(differences) - _LISTED} more")
    back = "an earlier checkpoint"
    if clean is not None:
        back = f"a checkpoint of step {clean}, the last found equal, or an earlier one"
    headline = f"{after}copies of arrays that must be equal differ ({_suspects(differences, mesh)})"
    text = headline + "".join(f"\n  - {line}" for line in shown)
    text += f"\nNo later step can be trusted: start again from {back}."
    raise ReplicasDiffer(differences, text, step, clean)


def _describe(difference: Difference, mesh: Mesh) -> str:
    leaf, copies, differ = difference
    what = f"{leaf.path} {leaf.dtype}{list(leaf.shape)}, {len(copies)} copies"
    if len(differ) == len(copies):
        return f"{what} without a majority: {_names(differ, mesh)} differ from each other"
    return f"{what}: {_names(differ, mesh)} {'differs' if len(differ) == 1 else 'differ'} from the others"


def _suspects(differences: Sequence[Difference], mesh: Mesh) -> str:
    """Name the devices with the most arrays that differ from the majority: "device 2: 5 arrays"."""
    counts = Counter(device for one in differences for device in one.differ)
    most = max(counts.values())
    named = sorted((device for device, count in counts.items() if count == most), key=lambda device: device.id)
    return f"{_names(named, mesh)}: {most} {'array' if most == 1 else 'arrays'}{' each' if len(named) > 1 else ''}"


def _names(devices: Sequence[jax.Device], mesh: Mesh) -> str:
    peers = peers_of(mesh)
    names = []
    for device in devices[:4]:
        names.append(f"device {device.id}" + (f" of {peers.name_of(device.process_index)}" if peers else ""))
    return ", ".join(names) + (f" and {len(devices) - 4} more devices" if len(devices) > 4 else "")
