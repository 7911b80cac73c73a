"""Layered Prefill: groups of layers instead of chunks of tokens, their traffic, and both under random arrivals."""

from workbench.perfmodels.layered_prefill.traffic import (
    chunked_iteration,
    iteration_ratio,
    layer_groups,
    layered_iteration,
    mean_decode_batch,
    mean_power,
    prefill_traffic,
    relative_change,
)

__all__ = [
    "chunked_iteration",
    "iteration_ratio",
    "layer_groups",
    "layered_iteration",
    "mean_decode_batch",
    "mean_power",
    "prefill_traffic",
    "relative_change",
]
