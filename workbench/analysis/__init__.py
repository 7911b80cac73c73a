"""What results say beside one another: comparison, explanation, sweeps, what more hardware is worth, and the report.

It calls the readers and draws; only notebooks, widgets, commands and benchmarks call it.
"""
