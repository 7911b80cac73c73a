"""Benchmark of routed experts on the CPU by tokens per expert, in each number format."""
