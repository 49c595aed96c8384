"""Proofs about traced programs: a walk that carries facts from inputs to results, and what is proven with it.

Imports `core/`.
"""
