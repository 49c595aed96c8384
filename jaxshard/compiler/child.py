"""Compile one program in a child process: a script that `judge.py` runs with a folder as its only argument.

It loads jaxlib and the compiler's plugin, for TPUs without importing JAX, and makes devices that only compile, so that
it never takes attached chips. The names of jaxlib that it needs are used in this file alone, and raise an error where a
version lacks them.

The folder has `program` (MLIR bytecode), `options` (serialized CompileOptions) and `request.json`. The compiler's dump
is written to `dump` in the folder, an error of the compiler to `error.txt`. The process ends when its standard input is
closed, which happens when its parent ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Compile the file `program` in a folder; the parent process kills this one once the dump is complete."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    request = json.loads((folder / "request.json").read_text())
    from jaxlib import xla_client

    devices = {device.id: device for device in _devices(request["platform"], request["name"], request["topology"])}
    options = xla_client.CompileOptions.ParseFromString((folder / "options").read_bytes())
    dump = ("xla_dump_to", str(folder / "dump"))
    options.env_option_overrides = [*map(tuple, request["overrides"]), dump]
    chosen = xla_client.DeviceList(tuple(devices[number] for number in request["devices"]))
    module = _parse((folder / "program").read_bytes())
    try:
        chosen[0].client.compile(module, executable_devices=chosen, compile_options=options)
    except Exception as error:  # any error of the compiler is its answer, which the parent reads
        (folder / "error.txt").write_text(str(error))


def _devices(platform: str, name: str, topology: dict[str, Any]) -> list[Any]:
    """Return the devices of a topology, for which programs can be compiled but not run."""
    if platform != "tpu":  # GPUs: JAX knows where its plugins are
        os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin then asks for no driver
        from jax.experimental import topologies

        return list(topologies.get_topology_desc(name, platform, **topology).devices)
    import libtpu
    from jaxlib import xla_client

    # libtpu takes a lock file for its chip; a process that only compiles neither needs it nor may wait for it.
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    xla_client.load_pjrt_plugin_dynamically("tpu", libtpu.get_library_path())
    xla_client.initialize_pjrt_plugin("tpu")
    made: Any = xla_client.make_tfrt_tpu_c_api_device_topology(name, **topology)
    return list(made._make_compile_only_devices())


def _parse(program: bytes) -> Any:
    """Parse MLIR bytecode to an MLIR module, with all dialects that JAX writes, such as StableHLO."""
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

    context, dialects = ir.Context(), ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(dialects)
    context.append_dialect_registry(dialects)
    context.load_all_available_dialects()
    mhlo.register_mhlo_dialect(context)
    for dialect in (chlo, mpmd, sdy, stablehlo):
        dialect.register_dialect(context)
    return ir.Module.parse(program, context)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
