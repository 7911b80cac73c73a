"""Benchmarks: contenders are interleaved, disturbed repetitions are dropped and counted, and ratios are printed."""
