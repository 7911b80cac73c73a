"""Benchmark of the gpu lane on the GPU at hand: ceilings, errors and speed of every kernel, and the best tiles."""
