"""Prove properties of an optax transform from the jaxprs of `tx.init` and `tx.update`.

`elementwise` proves that element i of an update depends only on element i of its parameter's arrays. `own_array` proves
that every parameter is updated only from its own arrays. `stacking` proves that stacked blocks are updated like single
blocks. Their result is a `report`. `trace` makes the jaxprs, `facts` defines the facts about a value, `transfer` has
rules for operations; `dependence` and `reach` are domains of the walk in `proofs/walk.py`.
"""
