"""`js.moe`: mixture of experts: routing, expert parallelism by all-to-alls, and grouped matrix products.

    moe -> routing, experts -> exchange, grouped

Imports `core/`.
"""
