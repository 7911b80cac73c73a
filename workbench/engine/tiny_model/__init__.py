"""Checkpoints made here: seeded random ones, and the tiny model that is trained on exercises."""
