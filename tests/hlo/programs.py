"""What the tests of this folder share: short programs in HLO's text format, and a model of shapes alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxshard.models.gpt import gpt
from tests.toys import Toy


def mesh_of(order=None, **axes):
    """A mesh of the first devices, or of these in another order."""
    devices = np.array(jax.devices())[np.arange(math.prod(axes.values())) if order is None else order]
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


XY = {"x": 2, "y": 4}
GROUPS = "replica_groups={{0,1,2,3},{4,5,6,7}}"


def program(entry, *computations, tables=""):
    """A program over eight devices whose entry has an f32[64,16] parameter %p."""
    body = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    added = "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  ROOT %s = f32[] add(%a, %a)\n}\n"
    return (
        f"HloModule test, is_scheduled=true, num_partitions=8\n{tables}\n{added}\n{''.join(computations)}\n"
        f"ENTRY %main (p: f32[64,16]) -> f32[64,16] {{\n  %p = f32[64,16]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


TABLES = """
FileNames
1 "/home/user/train.py"
2 "/opt/lib/python3.12/site-packages/flax/linen/linear.py"
3 "/home/user/main.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=3 function_name_id=1 line=10 end_line=10 column=4 end_column=9}
2 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
3 {file_name_id=2 function_name_id=1 line=271 end_line=271 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
"""
"""Parents are counted from one, the first frame being its own.

Frame 3 is a line of Flax, called from line 12 of the user's loss, called from line 10 of the user's program."""


def _moving(name, last):
    """A computation of a fusion that carries an all-gather."""
    return f"""%{name} (q: f32[64,16]) -> f32[256,16] {{
  %q = f32[64,16]{{1,0}} parameter(0)
  %ag = f32[256,16]{{1,0}} all-gather(%q), {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  {last}
}}
"""


GATHER_IN_FUSIONS = [
    _moving("begin", 'ROOT %c = (f32[256,16]) custom-call(%ag), custom_call_target="AsyncCollectiveStart"'),
    _moving("overlap", "ROOT %t = (f32[256,16]) tuple(%ag)"),
    _moving("end", 'ROOT %c = f32[256,16] custom-call(%ag), custom_call_target="AsyncCollectiveDone"'),
]
"""What the TPU compiler makes of one all-gather that runs beside products: it begins, goes on and ends in a fusion."""


def gpt_shapes(rows, **sizes):
    model = gpt(**sizes)
    return Toy(model.init, model.loss, {"tokens": jax.ShapeDtypeStruct((rows, sizes["seq"] + 1), jnp.int32)})
