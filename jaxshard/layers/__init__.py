"""Layers that never materialise what is large: attention and the language model's head.

Imports `core/`.
"""
