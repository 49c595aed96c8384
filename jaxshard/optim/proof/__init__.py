"""Prove properties of an optax transform from the jaxprs of `tx.init` and `tx.update`.

`elementwise` proves that element i of an update depends only on element i of its parameter's arrays. `own_array` proves
that every parameter is updated only from its own arrays. `stacking` proves that stacked blocks are updated like single
blocks. Their result is a `report`. `trace` makes the jaxprs, `dependence` and `reach` walk through them, `facts`
defines the facts about a value, and `transfer` has the rule of each operation. Imports `core/` only.
"""
