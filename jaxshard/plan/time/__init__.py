"""Estimate the time of a step: collectives on the `network`, matrix `products`, and their sum in `step_time`.

Imports `core/`, `cost/`, `layers/`, `schedules/`, `engines/` and `checks/`; only `plan/` imports it.
"""
