"""A step over eight devices as HLO text: one kernel, its moment and a batch, and the collectives that a test adds."""

from tests.hlo.programs import TABLES

GROUPS = "replica_groups=[1,8]<=[8]"
PAIRS = "source_target_pairs={{0,1},{1,0}}"
SPLIT = "sharding={devices=[1,8]<=[8]}"
WHOLE = "sharding={replicated}"
ROWS = "sharding={devices=[8,1]<=[8]}"

AT = "metadata={stack_frame_id=3}"
"""Of an operation in Flax's file, called from line 12 of the user's."""

NAMES = ("state.params['up']", "state.opt_state[0].mu['up']", "batch['weights']")


def step_text(*lines, shape="1024,64", kernel=SPLIT, moment=SPLIT, names=NAMES, sharded=True, devices=8):
    """The text of a step whose arguments are a kernel and its moment, f32[shape] on each device, and rows f32[20,1024].

    Args:
      *lines: operations of the entry. %kernel, %moment and %rows are the arguments, %grad and %hidden are computed.
    """
    said = [f", {one}" if sharded else "" for one in (kernel, moment, ROWS)]
    labels = [rf"""metadata={{op_name="{name}"}}""".replace("'", r"\'") for name in names]
    head = "input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }, entry_computation_layout={()->()}"
    body = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule jit_step, is_scheduled=true, {head}, num_partitions={devices}

{TABLES}
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (p0: f32[{shape}], p1: f32[{shape}], p2: f32[20,1024]) -> (f32[{shape}], f32[{shape}]) {{
  %kernel = f32[{shape}]{{1,0}} parameter(0){said[0]}, {labels[0]}
  %moment = f32[{shape}]{{1,0}} parameter(1){said[1]}, {labels[1]}
  %rows = f32[20,1024]{{1,0}} parameter(2){said[2]}, {labels[2]}
  %hidden = f32[20,512]{{1,0}} custom-call(%rows), custom_call_target="product"
  %grad = f32[1024,512]{{1,0}} custom-call(%rows, %hidden), custom_call_target="product"
{body}
  ROOT %result = (f32[{shape}]{{1,0}}, f32[{shape}]{{1,0}}) tuple(%kernel, %moment)
}}
"""


def gather(operand="kernel", shape="1024,512", dim=1, name="g", dtype="f32"):
    return f"%{name} = {dtype}[{shape}]{{1,0}} all-gather(%{operand}), {GROUPS}, dimensions={{{dim}}}, {AT}"


SCATTER = f"%s = f32[1024,64]{{1,0}} reduce-scatter(%grad), {GROUPS}, dimensions={{1}}, to_apply=%add, {AT}"
SUM = f"%s = f32[1024,512]{{1,0}} all-reduce(%grad), {GROUPS}, to_apply=%add, {AT}"
FSDP = (gather(), gather(name="again"), SCATTER)
