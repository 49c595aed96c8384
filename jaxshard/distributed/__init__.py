"""Several processes: on one machine, on the hosts of a cluster or of a TPU pod.

Joining them (`initialize`, which names those that are missing), comparing what they were given before they compute
together (`Disagreement`), stopping them after a common step (`Preemption`), ending them when one hangs or fails
(`Watchdog`, `leave`). Imports `core/` only.

They talk through the key-value store of JAX's coordinator, which process 0 holds. It works while devices are busy, and
from a thread even while the main thread of a process hangs in a collective. All values are text. The keys, with process
numbers <p> and counters <n>:

    jaxshard/host/<p>             the host name of a process                     agree.py
    jaxshard/agree/<peers>/<n>/   what is compared at one point of the program   agree.py
    jaxshard/gather/<n>/<p>       what one process tells all others              together.py
    jaxshard/failed/<p>           a process that ends by an error, and why       failures.py
    jaxshard/parting/<p>          a process that ends because another one did    failures.py
    jaxshard/stop/<n>/            after which step a run stops                   preemption.py
    jaxshard/watch/<n>/           signs of life and alarms                       watchdog.py
"""

from jaxshard.distributed.agree import Disagreement as Disagreement
from jaxshard.distributed.cluster import initialize as initialize
from jaxshard.distributed.failures import MissingProcess as MissingProcess
from jaxshard.distributed.hard_exit import leave as leave
from jaxshard.distributed.preemption import Preemption as Preemption
from jaxshard.distributed.watchdog import Watchdog as Watchdog
