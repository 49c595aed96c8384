"""Prove properties of a jaxpr: an abstract interpreter (`walk`) and the proofs that use it.

Imports `core/`.
"""
