"""Pipelines: the engine that runs a schedule's table in one program, and the pieces of which that program is made.

`engine` sets up the program, `device` is one device's part of it, `tick_loop` runs the table, `stages` the blocks,
`embed_and_head` the ends of the model; `split_backward` takes one block apart. Imports what `engines/` imports.
"""
