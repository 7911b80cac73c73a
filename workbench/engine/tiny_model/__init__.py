"""Checkpoints that this package makes: seeded random ones, and the tiny model that is trained on exercises."""
