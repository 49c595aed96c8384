"""Bytes per device: what arrays take in tiles, and what is alive at the fullest moment of a traced step, by role.

Imports `core/`, `engines/` and `training/`.
"""
