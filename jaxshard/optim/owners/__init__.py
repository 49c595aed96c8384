"""Assign each matrix to one device, its owner, which runs the matrix products of the optimizer's update for it.

`own` makes a layout with owners and `update` runs an optimizer's update under it. `stacks` groups equal matrices and
balances them over devices. `cores` finds the part of an update that needs the full matrix. `slices` proves that stacked
matrices are updated independently. `exchange` has the all-to-all, `same` compares jaxprs. Imports `core/` and
`optim/proof`.
"""
