"""stub"""
from __future__ import annotations
from dataclasses import dataclass
from workbench.core.errors import PipelineError
from workbench.pipeline.algebra import Pipeline, resolve
from workbench.pipeline.layer_graph import layer_graph
@dataclass(frozen=True)
class Mend:
    label: str
    pipeline: Pipeline
@dataclass(frozen=True)
class Fault:
    text: str
    path: tuple[int,...] | None
    mends: tuple[Mend,...]
def fault_of(pipeline):
    try: layer_graph(pipeline)
    except PipelineError as e: return Fault(str(e), getattr(e,'path',None), ())
    return None
