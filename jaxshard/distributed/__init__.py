"""Several processes: on one machine, on the hosts of a cluster or of a TPU pod.

Joining them, comparing what they were given, stopping them together. Imports `core/` only.
"""

from jaxshard.distributed.agree import Disagreement as Disagreement
from jaxshard.distributed.cluster import initialize as initialize
from jaxshard.distributed.hard_exit import leave as leave
from jaxshard.distributed.preemption import Preemption as Preemption
from jaxshard.distributed.watchdog import Watchdog as Watchdog
