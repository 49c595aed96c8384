"""`js.run_to_bytes` and `js.run_from_bytes`: a complete TrainState as the bytes of one safetensors file.

The tensors are the arrays of the TrainState in model order, with the names that they have in a checkpoint: "step",
"params/w", "opt_state/0/mu/w". The dtypes of random keys, which are stored as uint32 words, and the position of the
data are in the metadata, as a CRC-32 and a JSON object:

    "jaxshard.run": '7d3c9a01 {"keys": {"key": "key<fry>[]"}, "data": {"epoch": 2}}'
"""

from __future__ import annotations

import io
import json
import zlib
from typing import Any

import jax
import numpy as np

from jaxshard.checkpoint.leaves import Entry, entries, list_differences
from jaxshard.checkpoint.residuals import refuse_residuals
from jaxshard.checkpoint.safetensors.header import CODES
from jaxshard.checkpoint.safetensors.names import tensor_of
from jaxshard.checkpoint.safetensors.pieces import LIMIT
from jaxshard.checkpoint.safetensors.reader import check_tensors, open_buffer, place_tensor
from jaxshard.checkpoint.safetensors.writer import outputs_of, sort_widest_first, stream_outputs, write_file
from jaxshard.checkpoint.writer import check_arrays, check_data
from jaxshard.core.layout import Layout
from jaxshard.core.settings import with_own_settings
from jaxshard.core.tree import raise_all
from jaxshard.distributed.together import raise_together
from jaxshard.storage.strict_json import decode_object
from jaxshard.training.convert import convert_optimizer
from jaxshard.training.state import TrainState, check_run

_ABOUT = "jaxshard.run"


@with_own_settings
def run_to_bytes(run: TrainState, layout: Layout, *, data: Any = None) -> bytes:
    """Encode a run as bytes: parameters, optimizer and model state, step, random key. Every process calls this.

    Use it to save a run without a file system; a run of any other layout can be made from the bytes. Collectives are
    those of `js.save_safetensors`.

    Args:
      run: the run.
      layout: the layout of the run.
      data: the position of the data, as for `js.save`.

    Returns:
      The bytes of the complete run, in every process. Each tensor has a checksum.

    Raises:
      ValueError: the run does not fit the layout, has a dtype that safetensors lacks (the message names every such
        array), or JSON does not preserve `data`.
      TypeError: `run` is no TrainState.

    Example:
        raw = js.run_to_bytes(run, layout, data=batches.position)
        run, position = js.run_from_bytes(raw, layout)
    """
    owning, layout = layout, layout.without_owners
    check_run(owning, run)
    refuse_residuals(run, "js.run_to_bytes")
    wanted, _ = entries(layout, base=True)
    raise_all(
        (f"{entry.path}: {entry.dtype}" for entry in wanted if tensor_of(entry).dtype not in CODES),
        ValueError,
        "safetensors has no such dtypes; keep these arrays in another one, or use js.save",
    )
    check_data(data)
    run = convert_optimizer(run, owning, layout)
    outputs = sort_widest_first(outputs_of(check_arrays(wanted, run), layout.mesh))
    about = json.dumps({"keys": _key_dtypes(wanted), "data": data}, allow_nan=False)
    opened = io.BytesIO()
    sealed = f"{zlib.crc32(about.encode()):08x} {about}"
    write_file(opened, outputs, stream_outputs(outputs, layout.mesh, LIMIT), metadata={_ABOUT: sealed})
    return opened.getvalue()


@with_own_settings
def run_from_bytes(raw: bytes, layout: Layout) -> tuple[TrainState, Any]:
    """Make a run from its bytes, stored as a layout says. Every process calls this with the same bytes.

    Args:
      raw: the result of `js.run_to_bytes`, for a run of any layout.
      layout: the layout in which to store the run, made from the same model and optimizer.

    Returns:
      (the run, equal bit for bit; the position of the data).

    Raises:
      ValueError: the bytes are damaged, truncated or no run; an array is missing, unknown, or has another shape or
        dtype than the layout (the message names every such array; nothing is cast).

    Example:
        raw = js.run_to_bytes(run, layout, data=3)
        run, position = js.run_from_bytes(raw, layout)
    """
    problems: list[str] = []
    found, metadata = open_buffer("the bytes", np.frombuffer(raw, np.uint8), problems)
    data = None
    owning, layout = layout, layout.without_owners
    wanted, structure = entries(layout, base=True)
    if not problems:
        try:
            data = _decode_about(metadata, wanted)
        except ValueError as error:
            problems.append(f"the bytes: {error}")
    raise_together(problems, ValueError, "the bytes: not a complete run", point="js.run_from_bytes")
    check_tensors(wanted, "the bytes", found, verify=True)
    placed = (place_tensor(entry, found[entry.path], layout) for entry in wanted)
    stored = [entry.to_stored(x, layout.mesh) for entry, x in zip(wanted, placed, strict=True)]
    return convert_optimizer(jax.tree.unflatten(structure, stored), layout, owning), data


def _key_dtypes(wanted: list[Entry]) -> dict[str, str]:
    return {entry.path: str(entry.saved) for entry in wanted if entry.is_key}


def _decode_about(metadata: dict[str, str], wanted: list[Entry]) -> Any:
    """Return the position of the data from a file's metadata.

    Raises:
      ValueError: the metadata are damaged or not those of a run, or list other random keys than the layout.
    """
    checksum, _, about = metadata.get(_ABOUT, "").partition(" ")
    if not about:
        raise ValueError("they hold no run; js.from_bytes reads those of a model")
    if checksum != f"{zlib.crc32(about.encode()):08x}":
        raise ValueError("its metadata are not those that were written")
    fields = decode_object(about.encode())
    keys = fields.get("keys")
    if set(fields) != {"keys", "data"} or not isinstance(keys, dict):
        raise ValueError("its metadata are not those of a run")
    raise_all(list_differences(keys, _key_dtypes(wanted)), ValueError, "its random keys are not those of the layout")
    return fields["data"]
