"""Check a sharded step: its numbers (`js.parity`), its collectives (`js.audit`), its copies (`js.check_replicas`).

Its inputs are layouts, steps, training states and compiled programs. Imports `core/`, `adapt/`, `compiler/`, `hlo/`,
`layers/`, `optim/`, `distributed/`, `proofs/`, `engines/` and `training/`; `plan/` and `commands/` import it.
"""
