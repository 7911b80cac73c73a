"""Benchmark of the CPU kernels against ceilings of memory and arithmetic, and against baselines."""
