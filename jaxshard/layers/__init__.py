"""Layers that never materialise what is large: attention, experts, and the language model's head.

Imports `core/`.
"""
