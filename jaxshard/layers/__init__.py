"""Layers that never materialise their large intermediate arrays: attention, mixture of experts, the head's loss.

Imports `core/`.
"""
