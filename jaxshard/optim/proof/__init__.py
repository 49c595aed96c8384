"""Proofs about an optax transform, read off its traced program.

From the top: `elementwise` proves that each element of an update depends on its own element alone, `own_array` that
every parameter is updated from its own arrays, `stacking` that stacked blocks are updated as single ones are; what they
find is a `report`. `trace` makes the programs, `dependence` and `reach` walk through them, `transfer` has the rule of
each operation, `facts` says what can be known of a value, and `primitives` has the tables of JAX's operations. Imports
`core/` only.
"""
