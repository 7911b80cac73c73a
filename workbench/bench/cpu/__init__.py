"""The CPU kernels against memory, arithmetic and what a user would take instead."""
