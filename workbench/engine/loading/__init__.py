"""Checkpoints to tensors in memory: what is in the files, what operations take of it, and how the host stores it."""
