"""Estimate costs without running: FLOPs counted in a function's jaxpr, and limits of chips from data sheets.

Imports `core/` at most.
"""
