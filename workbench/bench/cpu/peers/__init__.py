"""Baselines of the CPU kernels by others: plain loops in Numba, torch, C intrinsics and vLLM."""
