"""Checkpoints: saved by one layout, restored by any other, every byte under a checksum; and models as safetensors.

dir/<step>/arrays/          what Orbax wrote: one array per name, in model order, without padding
dir/<step>/manifest.json    names, shapes and dtypes; checksums of all files; how it was made. Written last

Imports `core/`, `distributed/` and `training/`.
"""
