"""Several processes: on one machine, on the hosts of a cluster or of a TPU pod."""

from jaxshard._hosts import Disagreement as Disagreement
from jaxshard.distributed.cluster import initialize as initialize
from jaxshard.distributed.leaving import leave as leave
from jaxshard.distributed.preemption import Preemption as Preemption
from jaxshard.distributed.watchdog import Watchdog as Watchdog
