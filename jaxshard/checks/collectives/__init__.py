"""The collectives that a layout promises (`promise`), those found in a compiled program (`found`), and both compared.

`hlo`, `groups` and `source` read the text of a program; `weight_uses` and `pipeline` count what a loss and a schedule
need. Imports what `checks/` imports.
"""
