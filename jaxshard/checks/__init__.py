"""Check a sharded step: its numbers (`js.parity`), its collectives (`js.audit`), its copies (`js.check_replicas`).

It also reads the profile of a step (`js.read_profile`). Its inputs are layouts, steps, training states and compiled
programs. Imports `core/`, `adapt/`, `layers/`, `optim/`,
`distributed/`, `proofs/`, `engines/` and `training/`; only `plan/` and `commands/` import it.
"""
