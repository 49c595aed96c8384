"""Optimizer transforms for sharded training; every one is an ordinary optax transform."""

from .averaging import AveragedState as AveragedState
from .averaging import averaged as averaged
from .averaging import averaged_params as averaged_params
from .clipping import clip_by_global_norm as clip_by_global_norm
from .clipping import global_norm as global_norm
from .elementwise import Reason as Reason
from .elementwise import Report as Report
from .elementwise import check_elementwise as check_elementwise
from .elementwise import require_elementwise as require_elementwise
from .master import MasterState as MasterState
from .master import master as master
from .per_block import PerBlockState as PerBlockState
from .per_block import per_block as per_block
from .sharded import fsdp as fsdp
from .sharded import gather_params as gather_params
from .sharded import param_specs as param_specs
from .sharded import shard_params as shard_params
from .sharded import state_specs as state_specs
from .sharded import zero1 as zero1
from .sharded import zero2 as zero2
from .stacking import require_same_stacked as require_same_stacked
from .stacking import stacking_changes as stacking_changes
from .tensor import tensor as tensor
from .tensor import tensor_state_specs as tensor_state_specs
