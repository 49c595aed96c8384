"""Costs before anything runs: FLOPs counted in a function's program, and limits of chips from their data sheets.

Imports `core/` at most.
"""
