"""Estimate bytes per device: of arrays that a TPU stores in tiles, and of the arrays that are live at a step's peak.

Imports `core/`, `engines/` and `training/`.
"""
