"""Planning a run before it runs, as `js.plan`: memory, TPU topologies, FLOPs, and collectives promised and found.

Imports `core/`, `adapt/`, `cost/`, `layers/`, `schedules/`, `engines/`, `training/` and `checks/`; only `commands/`
imports it.
"""

from jaxshard.checks.collectives.compare import Comparison as Comparison
from jaxshard.checks.collectives.compare import Surprise as Surprise
from jaxshard.checks.collectives.compare import compare as compare
from jaxshard.checks.collectives.differences import Difference as Difference
from jaxshard.checks.collectives.expected import Expected as Expected
from jaxshard.checks.collectives.forbidden import Never as Never
from jaxshard.checks.collectives.found import Collective as Collective
from jaxshard.checks.collectives.found import Row as Row
from jaxshard.checks.collectives.found import arrays_only as arrays_only
from jaxshard.checks.collectives.found import split_scalars as split_scalars
from jaxshard.checks.collectives.found import summary as summary
from jaxshard.checks.collectives.found import table as table
from jaxshard.checks.collectives.instructions import Instruction as Instruction
from jaxshard.checks.collectives.instructions import in_host_memory as in_host_memory
from jaxshard.checks.collectives.instructions import rematerialized as rematerialized
from jaxshard.checks.collectives.program import Program as Program
from jaxshard.checks.collectives.promise import Promise as Promise
from jaxshard.checks.collectives.promise import promise as promise
from jaxshard.checks.programs.report import ProgramAudit as ProgramAudit
from jaxshard.checks.programs.report import audit_program as audit_program
from jaxshard.core.pictures.canvas import write_picture as write_picture
from jaxshard.cost.flops import model_flops as model_flops
from jaxshard.cost.flops import train_flops as train_flops
from jaxshard.cost.hardware import Chip as Chip
from jaxshard.cost.hardware import Network as Network
from jaxshard.cost.hardware import chip as chip
from jaxshard.cost.hardware import mfu as mfu
from jaxshard.plan.compiled.compile_for import compile_for as compile_for
from jaxshard.plan.compiled.verdict import Verdict as Verdict
from jaxshard.plan.memory.tiles import tiled_argument_bytes as tiled_argument_bytes
from jaxshard.plan.memory.tiles import tiled_bytes as tiled_bytes
from jaxshard.plan.pictures.memory import memory_figure as memory_figure
from jaxshard.plan.pictures.roofline import roofline_figure as roofline_figure
from jaxshard.plan.pictures.tiles import sharding_figure as sharding_figure
from jaxshard.plan.planned import planned_devices as planned_devices
from jaxshard.plan.planned import planned_mesh as planned_mesh
from jaxshard.plan.predict import predict as predict
from jaxshard.plan.prediction import MemoryPeak as MemoryPeak
from jaxshard.plan.prediction import Prediction as Prediction
from jaxshard.plan.search.ranking import Plan as Plan
from jaxshard.plan.search.ranking import Ranking as Ranking
from jaxshard.plan.search.search import search as search
from jaxshard.plan.time.network import CollectiveCost as CollectiveCost
from jaxshard.plan.time.network import collective_cost as collective_cost
from jaxshard.plan.time.network import collective_costs as collective_costs
from jaxshard.plan.time.products import ProductCost as ProductCost
from jaxshard.plan.time.products import product_costs as product_costs
from jaxshard.plan.time.step_time import StepTime as StepTime
from jaxshard.plan.time.step_time import step_time as step_time
from jaxshard.plan.topology import topology_devices as topology_devices
from jaxshard.plan.topology import topology_mesh as topology_mesh
