"""Benchmark of a layer's routed experts in bf16, on the GPU if there is one, against torch and Liger."""
