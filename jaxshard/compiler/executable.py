"""A compiled program as a file: a line of JSON that says what it was compiled from, then the serialized executable.

The executable is JAX's own serialization (`jax.experimental.serialize_executable`), which is a pickle. So the file is
read only where no other user could have written it. Its first line is compared before anything is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from jaxshard.compiler.trust import read_trusted
from jaxshard.core.installed import installed_version
from jaxshard.core.version import __version__

_FORMAT = "jaxshard executable 1"
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda12-pjrt", "jax-cuda13-pjrt")}
"""The packages that may hold the compiler for a platform; that for CPUs is in jaxlib."""


def save_executable(
    file: Path,
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    mesh: Mesh,
    options: dict[str, Any] | None,
) -> None:
    """Write a compiled program to a file, which replaces an older one only when it is complete.

    Args:
      file: the file; its folder is made if it is missing.
      lowered: the program before it was compiled.
      compiled: the program, compiled.
      mesh: the devices that it was compiled for; they may be those of a topology that is not attached.
      options: the compiler options.

    Raises:
      ValueError: the compiler of these devices can't serialize the program.
    """
    payload, _, _ = serialize(compiled)
    header = {"format": _FORMAT, **_facts(lowered, mesh, options), "payload": _digest(payload)}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as written:  # for its owner alone
        written.write(json.dumps(header).encode() + b"\n" + payload)
    os.replace(written.name, file)


def load_executable(
    file: Path, lowered: jax.stages.Lowered, mesh: Mesh, options: dict[str, Any] | None
) -> jax.stages.Compiled:
    """Read the compiled program of `lowered` from a file, ready to run on the devices of the mesh.

    Args:
      file: the file, written by `save_executable`.
      lowered: the program that the file must have been compiled from.
      mesh: the devices to run it on.
      options: the compiler options.

    Raises:
      FileNotFoundError: there is no such file.
      PermissionError: another user owns the file or may write it.
      ValueError: the file is damaged, or was compiled from another program, for other devices or by other versions.
    """
    line, _, payload = read_trusted(file).partition(b"\n")
    header = _read_header(file, line)
    expected = _facts(lowered, mesh, options)
    differing = [name for name in expected if header.get(name) != expected[name]]
    if differing:
        wrong = [f"{name}: {header.get(name)}, here {expected[name]}" for name in differing]
        raise ValueError(f"{file} was compiled from something else; compile it again here\n  " + "\n  ".join(wrong))
    if header.get("payload") != _digest(payload):
        raise ValueError(f"{file} is damaged: its bytes do not have the checksum in its first line; copy it again")
    devices = list(mesh.devices.flat)
    try:
        loaded: jax.stages.Compiled = deserialize_and_load(
            payload, lowered.in_tree, lowered.out_tree, backend=devices[0].client, execution_devices=devices
        )
    except jax.errors.JaxRuntimeError as error:
        kind = devices[0].device_kind
        raise ValueError(f"{file} can't be loaded on {kind}: {error}; compile it again here") from error
    return loaded


def _facts(lowered: jax.stages.Lowered, mesh: Mesh, options: dict[str, Any] | None) -> dict[str, Any]:
    """Return what must be equal where a program is compiled and where it is loaded."""
    first = mesh.devices.flat[0]
    return {
        "program": _digest(lowered.as_text().encode()),
        "devices": f"{mesh.size} {first.device_kind} ({first.platform})",
        "order": _digest(repr([_place(device) for device in mesh.devices.flat]).encode()),
        "options": json.dumps(options or {}, sort_keys=True, default=str),
        "jaxshard": __version__,
        # Versions of packages: a client without hardware describes the compiler in other words than one with it.
        **{name: installed_version(name) for name in ("jax", "jaxlib", *_COMPILERS.get(first.platform, ()))},
    }


def _place(device: jax.Device) -> tuple[int, ...]:
    """Return where a device is: coordinates in the torus, slice and core of a TPU, or the number of another device."""
    coords = getattr(device, "coords", None)
    if coords is None:
        return (int(device.id),)
    return (*coords, getattr(device, "slice_index", 0), getattr(device, "core_on_chip", 0))


def _read_header(file: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f"{file} is no compiled step; write one with step.save_compiled(batch, file)")
    return header


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
