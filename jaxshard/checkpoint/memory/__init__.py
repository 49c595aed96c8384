"""Keep a run in memory that outlives its processes, which continue from it when all of them are restarted.

    folder.py       the folder of shared memory, which `jaxshard launch` makes and removes
    segment.py      the file of one process in it, with two slots, one of which is always complete
    blocks.py       the shards of a process, each once, however many of its devices have it
    agreement.py    the newest step whose every block is in the memory of some process
    exchange.py     copy missing blocks from the memory of a replica
    checkpointer.py js.MemoryCheckpointer, a callback of js.fit that also restores

Processes agree through the coordinator's key-value store; blocks are sent over the mesh by an all-reduce in which all
terms except one are zero. Imports `core/`, `distributed/` and `training/`; folder.py imports no JAX.
"""
