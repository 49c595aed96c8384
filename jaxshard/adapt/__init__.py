"""From a model as its author wrote it to the pair `init_fn`, `loss_fn` of the contract."""
