"""`js.restore`: restore a run for any layout from a checkpoint that any other layout may have saved."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax

from jaxshard.checkpoint import loading
from jaxshard.checkpoint.checksums import Damaged, compare_arrays, compare_file_names, compare_files, compare_sizes
from jaxshard.checkpoint.folder import absolute_root, step_folder
from jaxshard.checkpoint.leaves import Entry, entries, list_differences
from jaxshard.checkpoint.manifest import Manifest, SavedArray, encode_manifest, read_manifest
from jaxshard.checkpoint.residuals import RESIDUALS, place_residuals, saved_residuals
from jaxshard.core.layout import Layout, check_layout, put_back
from jaxshard.core.low_rank import has_low_rank
from jaxshard.core.settings import with_own_settings
from jaxshard.core.tree import raise_all
from jaxshard.core.types import PyTree
from jaxshard.distributed.agree import peers_of
from jaxshard.distributed.facts import run_facts
from jaxshard.distributed.mismatch import digest
from jaxshard.distributed.together import raise_together
from jaxshard.storage.paths import AnyPath
from jaxshard.training.base import checksum_base
from jaxshard.training.convert import convert_optimizer
from jaxshard.training.placing import place_base, place_model
from jaxshard.training.state import TrainState, check_run


@with_own_settings
def restore(
    dir: str | os.PathLike[str],
    layout: Layout,
    *,
    step: int | None = None,
    verify: bool = True,
    init_from: PyTree = None,
) -> TrainState:
    """Restore a run from a folder of checkpoints, with the shardings of `layout`. Every process calls this.

    Parameters, optimizer and model state, random key and step are restored bit for bit, whatever strategy, mesh,
    schedule and number of processes the saved run had. Residuals of gradients (`js.wire.int8(feedback=True)`) are
    restored bit for bit if gradients are summed over the same number of devices; otherwise the sum of the residuals is
    divided evenly over the devices.

    Each process reads only what the shards of its devices need. A device needs memory for its shard of an array. If the
    layout pads the array or reshapes its first dimension, the device also needs memory for a shard of the array in
    model order, which is split over the same mesh axes as far as they divide the array's dimensions.

    Args:
      dir: the folder of checkpoints; also s3://bucket/run or gs://bucket/run.
      layout: the layout in which to store the run, made from the model and optimizer that were saved. If it was made
        without an optimizer (`js.layout(strategy, mesh, init_fn)`), the optimizer's state is not read.
      step: the number of the step; by default that of the newest complete step.
      verify: first compare every byte of the step with its checksum; each process reads a share of the files. With
        False, compare only the names and sizes of the files and the shapes and dtypes in them. Of a step in an object
        store, compare the generations (ETags) of its objects, or only the names; chunks that are read are compared
        with their checksums in any case.
      init_from: for a model of `js.lora`, whose checkpoints leave out the frozen base weights: the parameters that
        `js.init` received as `init_from=`, or a run of this layout, whose base weights are used unchanged.

    Returns:
      The run.

    Raises:
      ValueError: the tree, a shape or a dtype differs from the layout (the message names every such array; nothing is
        cast); the step is incomplete or has a newer format; `init_from` is missing, or does not have the base weights
        that the run was trained on (the message names every array with another checksum).
      js.Damaged: a file is damaged, missing or was added; the message names the file and the arrays in it. It is a
        ValueError.
      FileNotFoundError: there is no such folder or step.
      js.distributed.Disagreement: several processes differ in versions, flags, mesh or layout, or find different
        checkpoints.

    Example:
        js.save("run", run, layout)
        other = js.layout(js.hsdp(), js.make_mesh(replica=2, data=4), init_fn, tx)
        run = js.restore("run", other)      # another layout than the saved one
    """
    check_layout("js.restore(dir, layout)", layout)
    base = _find_base(init_from, layout)
    return read_run(absolute_root(dir), layout, step, verify=verify, base=base)


def read_run(root: AnyPath, layout: Layout, step: int | None, *, verify: bool, base: PyTree = None) -> TrainState:
    """Restore a run, as `restore` does, with the frozen base weights of `js.lora` from `base`.

    `base` is a tree of all parameters, as the layout stores them on the devices; it is ignored for other models.
    """
    owning, layout = layout, layout.without_owners
    folder, manifest = _find_step(root, layout, step)
    wanted, structure = entries(layout)
    without = layout.shapes.opt_state is None
    left = ("opt_state/", RESIDUALS) if without else ()  # of no use without an optimizer
    saved = [array for array in manifest.arrays if not array.path.startswith(left)]
    # Compare model and optimizer first: their differences explain more than those of residuals.
    _check_same_arrays(folder, [array for array in saved if not array.path.startswith(RESIDUALS)], wanted)
    residuals = saved_residuals(folder, layout, saved)
    _check_same_arrays(folder, saved, [*wanted, *residuals])
    _check_same_base(folder, manifest.base or {}, base, layout)
    check_intact(folder, manifest, verify=verify)
    try:
        every = [*wanted, *residuals]
        found = loading.load_arrays(
            folder / manifest.folder, {entry.path: entry.shape_saved(layout.mesh) for entry in every}
        )
    except Exception as error:  # of Orbax or TensorStore, about files that somebody else may have written
        raise ValueError(f"{folder}: its arrays can't be read: {' '.join(str(error).split())}") from error
    if (peers := peers_of(layout.mesh)) is not None:
        peers.meet("js.restore, arrays")  # one disk may be slow, and collectives don't wait long

    # Each array is freed once it is converted.
    stored = [entry.to_stored(found.pop(entry.path), layout.mesh) for entry in wanted]
    run: TrainState = jax.tree.unflatten(structure, stored)
    rest = place_residuals(layout, lambda entry: entry.to_stored(found.pop(entry.path), layout.mesh), residuals)
    run = run._replace(residuals=rest)
    if manifest.base:
        run = run._replace(params=put_back(layout.base, base, run.params))
    if int(run.step) != manifest.step:
        raise ValueError(f"{folder}: the run in it has taken {int(run.step)} steps, not {manifest.step}")
    return convert_optimizer(run, layout, owning)


def describe(dir: str | os.PathLike[str], *, step: int | None = None) -> Manifest:
    """Read the manifest of a step: names of the arrays, position of the data, mesh and versions.

    Args:
      dir: the folder of checkpoints.
      step: the number of the step; by default that of the newest complete step.

    Returns:
      The step's manifest.

    Raises:
      ValueError: the step is incomplete, or its manifest is damaged.
      FileNotFoundError: there is no such folder or step.
    """
    return read_manifest(step_folder(absolute_root(dir), step))


def check_intact(folder: AnyPath, manifest: Manifest, *, verify: bool) -> None:
    """Compare the files of a step with its manifest. Collective.

    Args:
      folder: the folder of the step.
      manifest: the manifest of the step.
      verify: True to read every file, a share of the files in each process, and compare checksums; otherwise compare
        only names and sizes.

    Raises:
      Damaged: in all processes, if any process found damage; each message names the files that its process found.
    """
    part, parts = jax.process_index(), jax.process_count()
    if verify:
        problems = compare_files(folder, manifest, part=part, parts=parts)
    else:
        problems = compare_file_names(folder, manifest) + compare_sizes(folder, manifest)
    raise_together(
        problems or compare_arrays(folder, manifest),
        Damaged,
        f"{folder}: step {manifest.step} is damaged; restore another one (js.latest_step(dir, intact=True) finds the "
        "newest that is not)",
        point="js.restore, checksums",
    )


def _find_step(root: AnyPath, layout: Layout, step: int | None) -> tuple[AnyPath, Manifest]:
    """Find the step to restore, and read its manifest; raise in all processes unless all find the same step."""
    failure = None
    try:
        folder = step_folder(root, step)
        manifest = read_manifest(folder)
        found = f"step {manifest.step} ({digest(encode_manifest(manifest))})"
    except (ValueError, OSError) as error:
        failure, found = error, f"none: {type(error).__name__}: {error}"
    if (peers := peers_of(layout.mesh)) is not None:
        peers.agree("js.restore", run_facts(layout) | {"checkpoint": found})
    if failure is not None:
        raise failure
    return folder, manifest


def _find_base(init_from: PyTree, layout: Layout) -> PyTree:
    """Convert the argument `init_from` of `restore` to parameters, as the layout stores them on the devices.

    They contain the frozen base weights of `js.lora`. For a layout without frozen weights the result is None.
    """
    if not any(jax.tree.leaves(layout.base)):
        if init_from is not None:
            raise ValueError(
                "init_from is for models of js.lora, whose checkpoints do not hold what is frozen; this layout's hold "
                "all parameters, so leave it out"
            )
        return None
    if init_from is None:
        raise ValueError(
            "this layout's checkpoints do not hold what js.lora froze; give it again as init_from=: the parameters "
            "that js.init started from, or a run of this layout"
        )
    if isinstance(init_from, TrainState):
        check_run(layout, init_from)
        return init_from.params
    place = place_model if has_low_rank(init_from) else place_base
    return place(init_from, layout, "init_from")[0]


def _check_same_base(folder: AnyPath, saved: dict[str, str], base: PyTree, layout: Layout) -> None:
    given = {} if base is None else checksum_base(base, layout)
    raise_all(
        list_differences(given, saved, " in init_from") if given != saved else [],
        ValueError,
        f"{folder}: the run was trained on another base than the one that is given (shape, dtype and checksum of each "
        "array); give init_from= the parameters that js.init started from, and base= of js.lora as it was",
    )


def _check_same_arrays(folder: AnyPath, saved: Sequence[SavedArray], wanted: Sequence[Entry]) -> None:
    found = {array.path: str(array) for array in saved}
    raise_all(
        list_differences(found, {entry.path: str(entry.saved) for entry in wanted}, " in the checkpoint"),
        ValueError,
        f"{folder}: the checkpoint is not one of this layout's model and optimizer, and nothing is cast or left out; "
        "make the layout from the init_fn and tx that it was saved with, or without an optimizer, "
        "js.layout(strategy, mesh, init_fn), to read all but its state",
    )
