"""Proofs about an optax transform, read off its traced program.

`elementwise` says whether each element of an update depends on its own element alone, `stacking` whether stacked blocks
are updated as single ones are. `trace` makes the program, `dependence` follows what depends on what through it. Imports
`core/` only.
"""
