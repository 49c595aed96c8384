"""Models as their authors wrote them, turned into the pair `init_fn`, `loss_fn` that the library trains.

Flax Linen and NNX modules, and models made of identical blocks. Imports `core/` only: an adapter knows no engine.
"""
