"""Engines, which compute loss and gradient: `auto`, `explicit` and, in `pipeline/`, `pipelined`.

An engine is a small value that makes a `value_and_grad` function; it knows no optimizer. Imports `core/`,
`adapt/`, `layers/`, `proofs/` and `schedules/`.
"""
