"""Keep copies of a run in shared memory, from which restarted processes continue after a process has died.

    folder.py       the folder in shared memory, which `jaxshard launch` makes and removes
    segment.py      the file of each process in this folder, with room for two steps, one of which is always complete
    blocks.py       the shards that a process copies: each once, however many of its devices have it
    agreement.py    find the newest step of which each shard is in the memory of some process
    exchange.py     copy missing shards from the memory of a replica
    checkpointer.py js.MemoryCheckpointer, a callback of js.fit that also restores

Processes agree through the coordinator's key-value store; blocks are sent over the mesh by an all-reduce in which all
terms except one are zero. Imports `core/`, `distributed/` and `training/`; folder.py imports no JAX.
"""
