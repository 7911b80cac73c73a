"""Benchmarks: what they compare is interleaved, disturbed repetitions are dropped and counted, ratios are printed."""
