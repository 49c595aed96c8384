"""The engines, which compute the gradient: `auto`, `explicit` and, in `pipeline/`, `pipelined`.

An engine is a small value from which a `value_and_grad` is made; it never touches an optimizer. Imports `core/`,
`adapt/`, `proofs/` and `schedules/`.
"""
