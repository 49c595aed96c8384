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
"""The uses of memory, in the order of tables."""
