"""Assign each matrix to one device, its owner, which computes the matrix products in the optimizer's update of it.

`own` makes a layout with owners, and `update` runs an optimizer's update under such a layout. `stacks` groups equal
matrices and balances them over devices. `cores` finds the part of an update that needs the full matrix. `slices` proves
that stacked matrices are updated independently. `exchange` has the all-to-all, `flops` counts the FLOPs of updates.
Imports `core/` and `optim/proof`.
"""
