"""WHERE each operation runs: the algebra that wires stages to a layer, and the layer's graph of segments and transfers.

Schedules lower that graph.
"""

from workbench.pipeline.algebra import (
    Element,
    Fork,
    Path,
    Piece,
    Pipeline,
    Resolved,
    cpu,
    fetch,
    gpu,
    load,
    offload,
    resolve,
    spelled,
    with_shared_experts,
)

__all__ = [
    "Element",
    "Fork",
    "Path",
    "Piece",
    "Pipeline",
    "Resolved",
    "cpu",
    "fetch",
    "gpu",
    "load",
    "offload",
    "resolve",
    "spelled",
    "with_shared_experts",
]
