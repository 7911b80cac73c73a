"""Compiled kernels of the virtual clock: prices of a plan's groups, the plan laid out on its lanes, whole iterations.

They compute what `Pricer`, `plan.play` and the queues compute, operation by operation and in the same order, so that
the results are the same bit by bit; no fast-math is allowed.
"""
