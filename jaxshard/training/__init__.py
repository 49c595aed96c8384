"""The training loop: the state of a run, the step, evaluation, `fit`, records, and what is done about bad steps.

Imports `core/`, `adapt/`, `layers/`, `optim/`, `distributed/`, `cost/`, `proofs/` and `engines/`.
"""
