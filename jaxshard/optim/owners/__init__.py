"""Matrices that are updated whole by the device that owns them, for optimizers that multiply matrices.

From the top: `own` makes a layout with owners, `update` runs an optimizer's update under it. `stacks` groups equal
matrices and balances them over devices, `cores` finds the part of an update that needs a whole matrix, `slices` proves
that stacked matrices are updated one by one, `same` compares programs. Imports `core/` and `optim/proof`.
"""
