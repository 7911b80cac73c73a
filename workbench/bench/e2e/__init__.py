"""Whole answers: this engine beside those that a user would take instead."""
