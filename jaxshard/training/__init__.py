"""The training loop: `TrainState`, the step, evaluation, `fit`, recorded metrics, and recovery from bad steps.

Imports `core/`, `adapt/`, `layers/`, `optim/`, `distributed/`, `cost/`, `compiler/`, `storage/`, `proofs/` and
`engines/`.
"""
