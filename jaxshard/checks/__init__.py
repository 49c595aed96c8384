"""Checks of a sharded step: its numbers against one device (`parity`), its collectives against the promise, its copies.

Sees layouts, steps, runs and compiled programs. Imports `core/`, `adapt/`, `layers/`, `optim/`,
`distributed/`, `proofs/`, `engines/` and `training/`; only `plan/` and `commands/` import it.
"""
