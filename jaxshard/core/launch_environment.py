"""Names of the environment variables by which the processes of one training run find each other.

`jaxshard launch` sets them and `js.distributed.initialize` reads them. This file imports nothing, so that the launcher
needs no JAX.
"""

COORDINATOR = "JAXSHARD_COORDINATOR_ADDRESS"
"""host:port of process 0."""

PROCESSES = "JAXSHARD_NUM_PROCESSES"
"""The number of processes."""

INDEX = "JAXSHARD_PROCESS_ID"
"""The index of this process among them, from 0."""

RESTARTS = "JAXSHARD_RESTARTS"
"""The number of restarts of all processes. For users' scripts; the library does not read it."""

LIMIT = "JAXSHARD_INITIALIZATION_TIMEOUT"
"""How many seconds a process waits for all the others to start."""

MEMORY = "JAXSHARD_MEMORY"
"""The in-memory folder in which `js.MemoryCheckpointer` keeps checkpoints across restarts of the processes."""

GOODPUT = "JAXSHARD_GOODPUT"
"""The file at which `js.fit` leaves its ledger of wall time, or a link to it, for the line at the end of the launch."""
