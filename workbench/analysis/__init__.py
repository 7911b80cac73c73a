"""Comparisons of results: explanations, sweeps, the worth of more hardware, and the report.

It calls the readers and draws; only notebooks, widgets, commands and benchmarks call it.
"""
