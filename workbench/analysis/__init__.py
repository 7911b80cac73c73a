"""Analysis of results: comparisons, explanations, sweeps, the gain from more hardware, and the report.

This package calls the readers and draws; only notebooks, widgets, commands and benchmarks call it.
"""
