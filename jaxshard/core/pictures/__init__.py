"""Draw pictures with matplotlib (extra viz) in a common style.

`style` has colours and sizes, `canvas` makes figures, `tiles` says which part of an array each device of a mesh holds.

Imports what `core/` imports.
"""
