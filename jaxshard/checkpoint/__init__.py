"""Checkpoints, which any layout saves and any other restores, with a checksum for every byte; and safetensors files.

    dir/<step>/arrays/          written by Orbax: one array per name, in model order, without padding
    dir/<step>/manifest.json    written last: names, shapes and dtypes, how the run was made, checksums of all files

A step is complete once its manifest is there. The way of a save, file by file:

    writer.py     save            checks the run, makes the folder
    snapshot.py                   copies to the host the shards that this process has to write
    store.py      compat.py       lets Orbax and TensorStore write them
    checksums.py  manifest.py     computes checksums of what is on disk now, then commits

and of a restore: folder.py finds the step, reader.py compares it with the layout and with its checksums, store.py reads
each device's part, and leaves.py brings it from model order to where the layout stores it. checkpointer.py saves in the
background of a training loop, with a lock on the folder (lock.py). memory/ keeps a run in memory that outlives its
processes, without any of this.

Imports `core/`, `distributed/`, `engines/` and `training/`.
"""
