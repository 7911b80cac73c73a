"""Pipelines place operations on devices (WHERE): the algebra that wires stages to a layer, and the layer's graph.

The nodes of the graph are segments and transfers. Schedules lower it.
"""

from workbench.pipeline.algebra import (
    BufferRows,
    Element,
    Fork,
    Path,
    Pipeline,
    Resolved,
    adding_sets,
    cpu,
    fetch,
    gpu,
    load,
    offload,
    resolve,
    spelled,
    with_shared_experts,
)
from workbench.pipeline.stack import LayerRange, Stack

__all__ = [
    "BufferRows",
    "Element",
    "Fork",
    "LayerRange",
    "Path",
    "Pipeline",
    "Resolved",
    "Stack",
    "adding_sets",
    "cpu",
    "fetch",
    "gpu",
    "load",
    "offload",
    "resolve",
    "spelled",
    "with_shared_experts",
]
