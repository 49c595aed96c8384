"""Adapt models to the pair `init_fn`, `loss_fn` that the library trains, without changes to their code.

The models are Flax Linen and NNX modules, and models of identical blocks. Imports `core/` and `proofs/`, no engines.
"""
