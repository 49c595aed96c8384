"""Plan a training run before it starts, as `js.plan`: memory, step time, promised and compiled collectives.

Imports `core/`, `adapt/`, `compiler/`, `cost/`, `hlo/`, `layers/`, `optim/`, `proofs/`, `schedules/`, `storage/`,
`engines/`, `training/` and `checks/`; only `commands/` imports it.
"""

from jaxshard.checks.collectives.promise import promise as promise
from jaxshard.checks.programs.report import audit_program as audit_program
from jaxshard.compiler.planned import planned_mesh as planned_mesh
from jaxshard.compiler.topology import topology_mesh as topology_mesh
from jaxshard.core.pictures.canvas import write_picture as write_picture
from jaxshard.cost.flops import train_flops as train_flops
from jaxshard.cost.hardware import chip as chip
from jaxshard.hlo.found import arrays_only as arrays_only
from jaxshard.hlo.found import summary as summary
from jaxshard.hlo.found import table as table
from jaxshard.plan.compiled.compile_for import compile_for as compile_for
from jaxshard.plan.pictures.memory import memory_figure as memory_figure
from jaxshard.plan.pictures.roofline import roofline_figure as roofline_figure
from jaxshard.plan.pictures.tiles import sharding_figure as sharding_figure
from jaxshard.plan.predict import predict as predict
from jaxshard.plan.search.search import search as search
from jaxshard.plan.time.network import collective_cost as collective_cost
