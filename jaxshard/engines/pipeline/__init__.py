"""The pipelined engine, which runs a schedule's table in one program, and the parts of that program.

Read first `schedules/runs` and `schedules/buffers`, which plan the program for a table. Here `engine` sets up the
program, `device` is one device's part of it, and `tick_loop` runs the table; `stages` runs the blocks of a device,
`split_backward` cuts one block into forward, B and W; `embed_and_head` runs the layers outside the blocks, `evaluate`
runs only forwards, `floats` separates floating activations from others. Imports what `engines/` imports.
"""
