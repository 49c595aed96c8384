"""Checkpoints: saved by one layout, restored by any other, every byte under a checksum.

dir/<step>/arrays/          what Orbax wrote: one array per name, in model order, without padding
dir/<step>/manifest.json    names, shapes and dtypes; checksums of all files; how it was made. Written last
"""

from jaxshard.checkpoint.checksums import Damaged as Damaged
from jaxshard.checkpoint.folder import latest_step as latest_step
from jaxshard.checkpoint.keeper import Checkpointer as Checkpointer
from jaxshard.checkpoint.reader import describe as describe
from jaxshard.checkpoint.reader import restore as restore
from jaxshard.checkpoint.writer import save as save
