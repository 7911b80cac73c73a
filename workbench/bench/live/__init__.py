"""Benchmarks of live runs against their simulation: the error of predictions, and the gain from overlap."""
