"""Text from a model: prompts are read once, then every token costs one position, by a cache of keys and values.

Imports `core/`, `adapt/`, `engines/` and `training/`.
"""
