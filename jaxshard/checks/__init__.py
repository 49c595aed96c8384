"""Checks of a sharded step: its numbers against one device (`parity`), its collectives against the promise.

Sees layouts, steps and compiled programs. Imports `core/`, `adapt/`, `layers/`, `engines/` and `training/`; only
`plan/` and `commands/` import it.
"""
