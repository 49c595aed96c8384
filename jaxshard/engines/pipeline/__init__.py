"""Pipelines: the engine that runs a schedule's table in one program, and the pieces of which that program is made.

First `schedules/runs` and `schedules/buffers`, which plan what the program does with a table; then here: `engine` sets
up the program, `device` is one device's part of it, `tick_loop` runs the table;
`stages` runs the blocks of a device, `split_backward` cuts one block into forward, B and W; `embed_and_head` are the
layers outside the blocks, `evaluate` runs forwards alone, `floats` separates floating activations from others. Imports
what `engines/` imports.
"""
