"""Train a Flax model and an optax optimizer on any mesh, with the same result as on one device.

The usual import is `import jaxshard as js`. Every name is imported when it is first used, so that this import takes
milliseconds and does not import JAX. The two lists below say where each name lives: the first for type checkers,
editors and readers, the second for Python. `tests/test_floors.py` keeps them equal.
"""

import importlib
from typing import TYPE_CHECKING

from jaxshard.core.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxshard import data as data
    from jaxshard import distributed as distributed
    from jaxshard import hf as hf
    from jaxshard import models as models
    from jaxshard import optim as optim
    from jaxshard import plan as plan
    from jaxshard import schedules as schedules
    from jaxshard.adapt.linen import linen as linen
    from jaxshard.adapt.lora import lora as lora
    from jaxshard.adapt.nnx import nnx as nnx
    from jaxshard.adapt.scanned import scanned as scanned
    from jaxshard.adapt.stack import stack as stack
    from jaxshard.adapt.stacked import Stacked as Stacked
    from jaxshard.checkpoint.checkpointer import Checkpointer as Checkpointer
    from jaxshard.checkpoint.checksums import Damaged as Damaged
    from jaxshard.checkpoint.folder import latest_step as latest_step
    from jaxshard.checkpoint.memory.checkpointer import MemoryCheckpointer as MemoryCheckpointer
    from jaxshard.checkpoint.reader import restore as restore
    from jaxshard.checkpoint.safetensors.reader import from_bytes as from_bytes
    from jaxshard.checkpoint.safetensors.reader import load_safetensors as load_safetensors
    from jaxshard.checkpoint.safetensors.run import run_from_bytes as run_from_bytes
    from jaxshard.checkpoint.safetensors.run import run_to_bytes as run_to_bytes
    from jaxshard.checkpoint.safetensors.writer import save_safetensors as save_safetensors
    from jaxshard.checkpoint.safetensors.writer import to_bytes as to_bytes
    from jaxshard.checkpoint.writer import save as save
    from jaxshard.checks.collectives.compare import audit as audit
    from jaxshard.checks.parity import Parity as Parity
    from jaxshard.checks.parity import parity as parity
    from jaxshard.checks.replicas import ReplicasDiffer as ReplicasDiffer
    from jaxshard.checks.replicas import ReplicaWatch as ReplicaWatch
    from jaxshard.checks.replicas import check_replicas as check_replicas
    from jaxshard.core import wire as wire
    from jaxshard.core.average import Average as Average
    from jaxshard.core.constrain import constrain as constrain
    from jaxshard.core.context import context as context
    from jaxshard.core.keys import row_keys as row_keys
    from jaxshard.core.layout import Layout as Layout
    from jaxshard.core.loss import Loss as Loss
    from jaxshard.core.loss import Max as Max
    from jaxshard.core.loss import Mean as Mean
    from jaxshard.core.loss import Model as Model
    from jaxshard.core.loss import Sum as Sum
    from jaxshard.core.loss import combine as combine
    from jaxshard.core.low_rank import merge_lora as merge_lora
    from jaxshard.core.mesh import make_mesh as make_mesh
    from jaxshard.core.mesh import simulate_devices as simulate_devices
    from jaxshard.core.placement import Placement as Placement
    from jaxshard.core.placement import View as View
    from jaxshard.core.rules import RULES as RULES
    from jaxshard.core.strategy import Strategy as Strategy
    from jaxshard.core.strategy import batch as batch
    from jaxshard.core.strategy import compose as compose
    from jaxshard.core.strategy import ddp as ddp
    from jaxshard.core.strategy import expert as expert
    from jaxshard.core.strategy import fsdp as fsdp
    from jaxshard.core.strategy import hsdp as hsdp
    from jaxshard.core.strategy import hybrid as hybrid
    from jaxshard.core.strategy import offload as offload
    from jaxshard.core.strategy import pipeline as pipeline
    from jaxshard.core.strategy import shard as shard
    from jaxshard.core.strategy import tensor as tensor
    from jaxshard.core.strategy import without_rows as without_rows
    from jaxshard.core.strategy import zero1 as zero1
    from jaxshard.core.strategy import zero2 as zero2
    from jaxshard.core.tree import Leaf as Leaf
    from jaxshard.data.batches import batches as batches
    from jaxshard.data.batches import local_batches as local_batches
    from jaxshard.engines.auto import auto as auto
    from jaxshard.engines.explicit import explicit as explicit
    from jaxshard.engines.pipeline.engine import pipelined as pipelined
    from jaxshard.engines.row_axes import row_axes as row_axes
    from jaxshard.generation.generate import generate as generate
    from jaxshard.hlo.found import collectives as collectives
    from jaxshard.layers.attention.attention import attention as attention
    from jaxshard.layers.cross_entropy import cross_entropy as cross_entropy
    from jaxshard.layers.head_loss import head_loss as head_loss
    from jaxshard.layers.moe.moe import moe as moe
    from jaxshard.layers.positions import positions as positions
    from jaxshard.optim.layout import layout as layout
    from jaxshard.optim.local import local as local
    from jaxshard.plan.guard.guard import GuardChanged as GuardChanged
    from jaxshard.plan.guard.guard import guard as guard
    from jaxshard.profile.read import read_profile as read_profile
    from jaxshard.reshard.transfer import plan_transfer as plan_transfer
    from jaxshard.reshard.transfer import transfer as transfer
    from jaxshard.training import metrics as metrics
    from jaxshard.training.attribution import Attribution as Attribution
    from jaxshard.training.attribution import attribution as attribution
    from jaxshard.training.describe import describe as describe
    from jaxshard.training.early_stopping import EarlyStopping as EarlyStopping
    from jaxshard.training.evaluate import averaged as averaged
    from jaxshard.training.evaluate import evaluate as evaluate
    from jaxshard.training.evaluate import make_apply as make_apply
    from jaxshard.training.evaluate import make_eval_step as make_eval_step
    from jaxshard.training.fit import fit as fit
    from jaxshard.training.goodput import Goodput as Goodput
    from jaxshard.training.gradient import value_and_grad as value_and_grad
    from jaxshard.training.module import from_module as from_module
    from jaxshard.training.module import to_module as to_module
    from jaxshard.training.non_finite import Bad as Bad
    from jaxshard.training.non_finite import BadStep as BadStep
    from jaxshard.training.non_finite import Rollback as Rollback
    from jaxshard.training.non_finite import check_finite as check_finite
    from jaxshard.training.progress import Progress as Progress
    from jaxshard.training.records import Record as Record
    from jaxshard.training.runs import clone as clone
    from jaxshard.training.runs import replace_params as replace_params
    from jaxshard.training.state import TrainState as TrainState
    from jaxshard.training.state import init as init
    from jaxshard.training.state import logical as logical
    from jaxshard.training.step import Step as Step
    from jaxshard.training.step import make_step as make_step

_SUBMODULES = {
    "data": "jaxshard.data",
    "distributed": "jaxshard.distributed",
    "hf": "jaxshard.hf",
    "metrics": "jaxshard.training.metrics",
    "models": "jaxshard.models",
    "optim": "jaxshard.optim",
    "plan": "jaxshard.plan",
    "schedules": "jaxshard.schedules",
    "wire": "jaxshard.core.wire",
}

_NAMES = {
    "adapt.linen": ("linen",),
    "adapt.lora": ("lora",),
    "adapt.nnx": ("nnx",),
    "adapt.scanned": ("scanned",),
    "adapt.stack": ("stack",),
    "adapt.stacked": ("Stacked",),
    "checkpoint.checkpointer": ("Checkpointer",),
    "checkpoint.checksums": ("Damaged",),
    "checkpoint.folder": ("latest_step",),
    "checkpoint.memory.checkpointer": ("MemoryCheckpointer",),
    "checkpoint.reader": ("restore",),
    "checkpoint.safetensors.reader": ("from_bytes", "load_safetensors"),
    "checkpoint.safetensors.run": ("run_from_bytes", "run_to_bytes"),
    "checkpoint.safetensors.writer": ("save_safetensors", "to_bytes"),
    "checkpoint.writer": ("save",),
    "checks.collectives.compare": ("audit",),
    "checks.parity": ("Parity", "parity"),
    "profile.read": ("read_profile",),
    "checks.replicas": ("ReplicaWatch", "ReplicasDiffer", "check_replicas"),
    "core.constrain": ("constrain",),
    "core.context": ("context",),
    "layers.cross_entropy": ("cross_entropy",),
    "core.keys": ("row_keys",),
    "core.layout": ("Layout",),
    "core.average": ("Average",),
    "core.loss": ("Loss", "Max", "Mean", "Model", "Sum", "combine"),
    "core.low_rank": ("merge_lora",),
    "core.mesh": ("make_mesh", "simulate_devices"),
    "core.placement": ("Placement", "View"),
    "layers.positions": ("positions",),
    "engines.row_axes": ("row_axes",),
    "core.rules": ("RULES",),
    "core.strategy": (
        "Strategy",
        "batch",
        "compose",
        "ddp",
        "expert",
        "fsdp",
        "hsdp",
        "hybrid",
        "offload",
        "pipeline",
        "shard",
        "tensor",
        "without_rows",
        "zero1",
        "zero2",
    ),
    "core.tree": ("Leaf",),
    "data.batches": ("batches", "local_batches"),
    "engines.auto": ("auto",),
    "engines.explicit": ("explicit",),
    "engines.pipeline.engine": ("pipelined",),
    "generation.generate": ("generate",),
    "layers.attention.attention": ("attention",),
    "layers.head_loss": ("head_loss",),
    "layers.moe.moe": ("moe",),
    "optim.layout": ("layout",),
    "optim.local": ("local",),
    "plan.guard.guard": ("GuardChanged", "guard"),
    "training.attribution": ("Attribution", "attribution"),
    "training.describe": ("describe",),
    "training.early_stopping": ("EarlyStopping",),
    "training.evaluate": ("averaged", "evaluate", "make_apply", "make_eval_step"),
    "training.fit": ("fit",),
    "training.goodput": ("Goodput",),
    "training.gradient": ("value_and_grad",),
    "training.runs": (
        "clone",
        "replace_params",
    ),
    "training.module": ("from_module", "to_module"),
    "training.non_finite": ("Bad", "BadStep", "Rollback", "check_finite"),
    "training.progress": ("Progress",),
    "training.records": ("Record",),
    "training.state": ("TrainState", "init", "logical"),
    "training.step": ("Step", "make_step"),
    "hlo.found": ("collectives",),
    "reshard.transfer": ("plan_transfer", "transfer"),
}

_MODULE_OF = {name: f"jaxshard.{module}" for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_SUBMODULES, *_MODULE_OF])


_ELSEWHERE = {"zero3": "fsdp", "dp": "ddp", "tp": "tensor", "pp": "pipeline", "ep": "expert"}
"""Names that others use for what has another name here."""


def _suggest(name: str) -> str:
    if name.startswith("_"):  # pytest, doctest and inspect ask every module for names of their own
        return ""
    from difflib import get_close_matches

    near = [_ELSEWHERE[name]] if name in _ELSEWHERE else get_close_matches(name, __all__, 1)
    return f"; did you mean js.{near[0]}?" if near else ""


if not TYPE_CHECKING:  # type checkers have the imports above, and report every other name

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:
            value = importlib.import_module(_SUBMODULES[name])
        elif name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        else:
            raise AttributeError(f"module 'jaxshard' has no attribute {name!r}{_suggest(name)}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
