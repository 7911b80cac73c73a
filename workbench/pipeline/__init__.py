"""Pipelines place operations on devices (WHERE): the algebra that wires stages to a layer, and the layer's graph.

The nodes of the graph are segments and transfers. Schedules lower it.
"""

from workbench.pipeline.algebra import (
    Pipeline,
    Resolved,
    adding_sets,
    cpu,
    fetch,
    gpu,
    load,
    offload,
    resolve,
    shared_beside,
    with_shared_experts,
)
from workbench.pipeline.code import code_of
from workbench.pipeline.edits import (
    Stored,
    added,
    can_be_divided,
    cut_at,
    divided,
    fetched,
    forked,
    joined,
    merged,
    optioned,
    placed,
    removed,
    shifted,
    stored,
    with_range,
    with_rows,
    with_set,
    with_stored,
)
from workbench.pipeline.elements import BufferRows, Element, Fork, Path, element_at, located, spelled
from workbench.pipeline.mends import Fault, Mend, absent, fault_of, lacking
from workbench.pipeline.parsing import pipeline_of
from workbench.pipeline.stack import LayerRange, Stack, ranges_of
from workbench.pipeline.transfers import connected

__all__ = [
    "BufferRows",
    "Element",
    "Fault",
    "Fork",
    "LayerRange",
    "Mend",
    "Path",
    "Pipeline",
    "Resolved",
    "Stack",
    "Stored",
    "absent",
    "added",
    "adding_sets",
    "can_be_divided",
    "code_of",
    "connected",
    "cpu",
    "cut_at",
    "divided",
    "element_at",
    "fault_of",
    "fetch",
    "fetched",
    "forked",
    "gpu",
    "joined",
    "lacking",
    "load",
    "located",
    "merged",
    "offload",
    "optioned",
    "pipeline_of",
    "placed",
    "ranges_of",
    "removed",
    "resolve",
    "shared_beside",
    "shifted",
    "spelled",
    "stored",
    "with_range",
    "with_rows",
    "with_set",
    "with_shared_experts",
    "with_stored",
]
