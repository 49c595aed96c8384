"""A run in memory that outlives its processes, from which they go on when all of them are started again.

    folder.py       where it lies: a folder of shared memory, which `jaxshard launch` makes and removes
    segment.py      the file of one process in it, with two slots, one of which is always whole
    blocks.py       which parts of the arrays a process holds: one of each, however many of its devices have it
    agreement.py    the newest step of which some process has every part, and who has which
    exchange.py     parts of which a process has no copy, from the memory of its replica
    checkpointer.py js.MemoryCheckpointer, a callback of js.fit, and back

Processes agree through the coordinator's key-value store; parts move over the mesh, by a sum of which all terms but one
are zero. Imports `core/`, `distributed/` and `training/`; folder.py imports no JAX.
"""
