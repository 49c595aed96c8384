"""The training loop: the state of a run, the step, evaluation, `fit`, records, and what is done about bad steps.

Imports everything below it: `core/`, `adapt/`, `optim/`, `distributed/`, `cost/`, `engines/`.
"""
