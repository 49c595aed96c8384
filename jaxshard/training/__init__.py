"""The training loop: the state of a run, the step, evaluation, `fit`, records, and recovery from bad steps.

Imports `core/`, `adapt/`, `layers/`, `optim/`, `distributed/`, `cost/`, `proofs/` and `engines/`.
"""
