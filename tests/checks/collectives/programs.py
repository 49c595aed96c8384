"""What the tests of this folder share: short programs in HLO's text format, and a model of shapes alone."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxshard.models.gpt import gpt
from tests.toys import Toy


def mesh_of(**axes):
    count = math.prod(axes.values())
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


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
