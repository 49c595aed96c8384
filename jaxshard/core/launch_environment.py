"""The environment variables by which the processes of one run find each other.

`jaxshard launch` sets them and `js.distributed.initialize` reads them. They have a file of their own so that the
launcher, which outlives many runs, does not import JAX.
"""

COORDINATOR = "JAXSHARD_COORDINATOR_ADDRESS"
"""host:port of process 0."""

PROCESSES = "JAXSHARD_NUM_PROCESSES"
"""The number of processes."""

INDEX = "JAXSHARD_PROCESS_ID"
"""The index of this process among them, from 0."""

RESTARTS = "JAXSHARD_RESTARTS"
"""The number of times that all processes were started again. For users' scripts; the library does not read it."""

LIMIT = "JAXSHARD_INITIALIZATION_TIMEOUT"
"""How many seconds a process waits for all the others to start."""

MEMORY = "JAXSHARD_MEMORY"
"""The folder, in memory, in which `js.MemoryCheckpointer` keeps runs from one start of the processes to the next."""
