"""Several processes: on one machine, on the hosts of a cluster or of a TPU pod.

Joining them (`initialize`), comparing what they were given before they compute together (`Disagreement`), stopping them
after a common step (`Preemption`), ending them when one hangs or fails (`Watchdog`, `leave`). They talk through JAX's
key-value store, which works while devices are busy. Imports `core/` only.
"""

from jaxshard.distributed.agree import Disagreement as Disagreement
from jaxshard.distributed.cluster import initialize as initialize
from jaxshard.distributed.hard_exit import leave as leave
from jaxshard.distributed.preemption import Preemption as Preemption
from jaxshard.distributed.watchdog import Watchdog as Watchdog
