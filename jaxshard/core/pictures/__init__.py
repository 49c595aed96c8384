"""Pictures by matplotlib (extra viz) in one look.

`style` has colours and sizes, `canvas` makes figures, `tiles` says which part of an array each device of a mesh holds.

Imports what `core/` imports.
"""
