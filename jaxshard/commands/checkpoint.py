"""`jaxshard checkpoint`: list, show and verify the saved steps in a folder."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from jaxshard.checkpoint.checksums import compare_file_names, compare_step, try_manifest
from jaxshard.checkpoint.folder import absolute_root, has_manifest, step_folder, step_folders
from jaxshard.commands.errors import usage_errors
from jaxshard.commands.flags import Checkpoint
from jaxshard.commands.json_object import write_json
from jaxshard.commands.terminal import facts, printable, start
from jaxshard.core.layout import human_bytes
from jaxshard.storage.paths import AnyPath


def run(flags: Checkpoint) -> int:
    """Run `jaxshard checkpoint`: list, show or verify the saved steps in a folder.

    Returns:
      The exit status: 1 if a file is missing, was added, or differs from what was saved; else 0.
    """
    console, deep = start(flags), flags.action == "verify"
    with usage_errors():
        folders = _folders(absolute_root(flags.dir), flags.step)
    if flags.action == "show":
        newest = max((number for number in folders if has_manifest(folders[number])), default=max(folders))
        folders = {newest: folders[newest]}
    steps = [_describe_step(one, deep=deep) for one in folders.values()]
    for row in steps:
        for line in (_step_line(row, deep=deep), *(f"  {problem}" for problem in row["problems"])):
            console.print(printable(line))
    result = {"folder": str(flags.dir), "steps": steps}
    if flags.action == "show":
        result = steps[0] | _show(console, folders[newest])
    write_json(flags.json, result)
    return int(any(row["problems"] for row in steps))


def _folders(root: AnyPath, step: int | None) -> dict[int, AnyPath]:
    """Return {step: folder} for all saved steps, or for `step` alone; incompletely saved steps are included."""
    folders = step_folders(root)
    if not folders or (step is not None and step not in folders):
        step_folder(root, step)  # raises the error that fits
    return folders if step is None else {step: folders[step]}


def _describe_step(folder: AnyPath, *, deep: bool) -> dict[str, Any]:
    """Describe a saved step (size, mesh, time ...) and its problems: missing files, and with `deep` changed bytes."""
    manifest, problems = try_manifest(folder)
    if manifest is None:
        return {"step": int(folder.name), "problems": problems}
    problems = compare_step(folder, manifest) if deep else compare_file_names(folder, manifest)
    counts = {"arrays": len(manifest.arrays), "files": len(manifest.files) + 1, "bytes": manifest.size}
    made = {name: manifest.made.get(name) for name in ("time", "mesh", "processes", "jaxshard", "jax")}
    return {"step": manifest.step, "problems": problems} | counts | made


def _step_line(row: dict[str, Any], *, deep: bool) -> str:
    state = "damaged" if row["problems"] else "intact" if deep else "complete"
    if "bytes" not in row:
        return f"step {row['step']}: {state}"
    size = f"{human_bytes(row['bytes'])} in {row['files']} files, {row['arrays']} arrays"
    return f"step {row['step']}: {state}, {size}, saved {row['time']} on mesh {_mesh_text(row['mesh'])}"


def _mesh_text(mesh: Any) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.items()) if isinstance(mesh, dict) else "unknown"


def _show(console: Console, folder: AnyPath) -> dict[str, Any]:
    """Print the arrays and the layout of a saved step; return them for the JSON object, or {} without a manifest."""
    manifest, _ = try_manifest(folder)
    if manifest is None:
        return {}
    made = manifest.made
    by = f"jaxshard {made.get('jaxshard')}, JAX {made.get('jax')}, {made.get('processes')} process(es)"
    facts(console, {"made by": printable(by)} | ({} if manifest.data is None else {"data": printable(manifest.data)}))
    console.print()
    for array in manifest.arrays:
        console.print(printable(f"  {array.path}  {array.dtype}{list(array.shape)}"))
    console.print(f"\nthe layout that saved it:\n{printable(made.get('layout'))}")
    return {"data": manifest.data, "tree": [array._asdict() for array in manifest.arrays], "made": made}
