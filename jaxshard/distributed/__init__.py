"""Train with several processes: on one machine, on the hosts of a cluster or of a TPU pod.

`initialize` joins the processes, and names missing processes. All processes compare programs and data before they
compute together (`Disagreement`), stop after a common step (`Preemption`), and end when one of them hangs or fails
(`Watchdog`, `leave`), is killed, or is on a host that is cut off. Imports `core/` only.

Processes communicate through the key-value store of JAX's coordinator, which runs in process 0. The store works while
devices are busy, and a thread can use it even while the main thread hangs in a collective. All values are text. The
keys, with process indices <p> and counters <n>:

    jaxshard/host/<p>             the host name of a process                     agree.py
    jaxshard/agree/<peers>/<n>/   facts compared at one point of the program     agree.py
    jaxshard/gather/<n>/<p>       text of one process for all others             together.py
    jaxshard/failed/<p>           process <p> ends by an error, and why          failures.py
    jaxshard/parting/<p>          process <p> ends because another failed        failures.py
    jaxshard/stop/<n>/            the step after which all processes stop        preemption.py
    jaxshard/watch/<n>/           heartbeats and alarms                          watchdog.py
"""

from jaxshard.distributed.agree import Disagreement as Disagreement
from jaxshard.distributed.cluster import initialize as initialize
from jaxshard.distributed.failures import MissingProcess as MissingProcess
from jaxshard.distributed.hard_exit import leave as leave
from jaxshard.distributed.preemption import Preemption as Preemption
from jaxshard.distributed.watchdog import Watchdog as Watchdog
