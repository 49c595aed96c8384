"""Checkpoints that any layout can save and any other layout restore, with a checksum for every byte; safetensors files.

    dir/<step>/arrays/          written by Orbax: named arrays, in model order, without padding
    dir/<step>/manifest.json    written last: names, shapes and dtypes, how the run was made, checksums of all files

In an object store (s3://, gs://) the arrays are in <step>/arrays-<epoch>/, written by TensorStore.

A step is complete when its manifest exists. A save runs through these files:

    writer.py                     checks the run, makes the folder
    snapshot.py                   copies to the host the shards that this process writes
    store.py      compat.py       writes these shards by Orbax and TensorStore; objects.py into an object store
    checksums.py  manifest.py     computes checksums of the files on disk, then writes the manifest

A restore: folder.py finds the step, reader.py compares its manifest with the layout and its files with their checksums,
loading.py reads each device's part of each array, and leaves.py converts arrays from model order to the stored
sharding. checkpointer.py saves in the background of a training loop, and owns the folder meanwhile (ownership.py): by a
lock on disk (lock.py), by a lease in an object store (lease.py). memory/ is independent of these files: it keeps copies
of a run in shared memory, from which restarted processes continue.

Imports `core/`, `distributed/`, `engines/`, `storage/` and `training/`.
"""
