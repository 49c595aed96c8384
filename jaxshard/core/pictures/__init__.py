"""The look of everything that is shown: colours, pictures by matplotlib, and tables and drawings of notebooks.

`style` has colours and sizes, `canvas` makes figures (extra viz), `page` makes HTML of tables and bars without any
other package, `tiles` says which part of an array each device of a mesh holds.

Imports what `core/` imports.
"""
