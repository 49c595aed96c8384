"""What a layout will cost and what a compiled step really does: memory, collectives, topologies."""
