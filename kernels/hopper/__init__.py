"""TODO by its owner."""
