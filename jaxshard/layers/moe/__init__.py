"""`js.moe`: which experts a token goes to, its exchange with the devices that hold them, and their products.

    moe -> routing, experts -> exchange, grouped

Imports `core/`.
"""
