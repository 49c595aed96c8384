"""The roles of memory."""

ROLES = (
    "parameters",
    "gradients",
    "optimizer state",
    "model state",
    "batch",
    "kept activations",
    "gathered weights",
    "logits",
    "temporaries",
)
"""What memory is used for, in the order in which tables show it."""
