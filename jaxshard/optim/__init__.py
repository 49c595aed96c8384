"""Optimizer transforms for sharded training; all are ordinary optax transforms.

    in make_step                 adam8bit, averaged, master, per_block, stochastic_round, and any transform of optax
    in a shard_map of your own   zero1, zero2, fsdp (`zero`, which splits arrays as `parts` says), tensor, clipping

The proofs about a transform are in `proof/`. Imports `core/` and `proofs/`.
"""

from jaxshard.optim.averaging import AveragedState as AveragedState
from jaxshard.optim.averaging import averaged as averaged
from jaxshard.optim.averaging import averaged_params as averaged_params
from jaxshard.optim.clipping import clip_by_global_norm as clip_by_global_norm
from jaxshard.optim.clipping import global_norm as global_norm
from jaxshard.optim.eight_bit import Adam8bitState as Adam8bitState
from jaxshard.optim.eight_bit import adam8bit as adam8bit
from jaxshard.optim.eight_bit import scale_by_adam8bit as scale_by_adam8bit
from jaxshard.optim.master import MasterState as MasterState
from jaxshard.optim.master import master as master
from jaxshard.optim.parts import gather_params as gather_params
from jaxshard.optim.parts import param_specs as param_specs
from jaxshard.optim.parts import shard_params as shard_params
from jaxshard.optim.parts import state_specs as state_specs
from jaxshard.optim.per_block import PerBlockState as PerBlockState
from jaxshard.optim.per_block import per_block as per_block
from jaxshard.optim.proof.elementwise import check_elementwise as check_elementwise
from jaxshard.optim.proof.elementwise import require_elementwise as require_elementwise
from jaxshard.optim.proof.own_array import Dependence as Dependence
from jaxshard.optim.proof.own_array import check_own_array as check_own_array
from jaxshard.optim.proof.report import Reason as Reason
from jaxshard.optim.proof.report import Report as Report
from jaxshard.optim.proof.stacking import require_same_stacked as require_same_stacked
from jaxshard.optim.proof.stacking import stacking_changes as stacking_changes
from jaxshard.optim.stochastic import StochasticState as StochasticState
from jaxshard.optim.stochastic import stochastic_round as stochastic_round
from jaxshard.optim.tensor import tensor as tensor
from jaxshard.optim.tensor import tensor_state_specs as tensor_state_specs
from jaxshard.optim.zero import fsdp as fsdp
from jaxshard.optim.zero import zero1 as zero1
from jaxshard.optim.zero import zero2 as zero2
