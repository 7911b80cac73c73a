"""MoE Workbench: describe a Mixture-of-Experts pipeline once; bound, simulate and run it, and see why they differ."""

import importlib
from typing import TYPE_CHECKING, Any

from workbench.analysis.compare import Comparison, compare
from workbench.analysis.costs import Costs, costs
from workbench.analysis.shadow_prices import ShadowPrices, shadow_prices
from workbench.analysis.sustained import sustained_rate
from workbench.core.catalogue import data_path
from workbench.core.latency import Slo
from workbench.core.result import Result, Source
from workbench.hardware import Interconnect, Machine, machines
from workbench.hardware.assembly import machine
from workbench.hardware.processors import (
    Efficiency,
    Processor,
    ProcessorKind,
    drives,
    efficiencies,
    links,
    processors,
)
from workbench.models import ModelConfig, checkpoint, eos_token_ids, model, models
from workbench.perfmodels import bound
from workbench.scenario import Memory, Scenario
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.resource_aware import Admission, ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.serving import fits
from workbench.simulate import Detail, simulate
from workbench.stages import ExpertSet, most_used
from workbench.workload import Frequencies, Request, Sampling, Uniform, Workload, workloads
from workbench.workload.exam import make_exam
from workbench.workload.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from workbench.analysis.advise import Advice, advise
    from workbench.analysis.optimize import Optimum, optimize
    from workbench.analysis.sweeps import Sweep, sweep
    from workbench.engine import RunState, calibrate, make_checkpoint, run, start
    from workbench.jobs import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Admission",
    "Advice",
    "ChunkedPrefill",
    "Comparison",
    "ContinuousBatching",
    "Costs",
    "Detail",
    "Efficiency",
    "ExpertSet",
    "Frequencies",
    "Interconnect",
    "LayeredPrefill",
    "Machine",
    "Memory",
    "ModelConfig",
    "Optimum",
    "Processor",
    "ProcessorKind",
    "Request",
    "ResourceAware",
    "Result",
    "RunState",
    "Sampling",
    "Scenario",
    "ShadowPrices",
    "Slo",
    "Source",
    "StaticBatching",
    "Sweep",
    "Uniform",
    "Workload",
    "advise",
    "bound",
    "calibrate",
    "checkpoint",
    "compare",
    "costs",
    "data_path",
    "drives",
    "efficiencies",
    "eos_token_ids",
    "fits",
    "links",
    "load_tokenizer",
    "machine",
    "machines",
    "make_checkpoint",
    "make_exam",
    "model",
    "models",
    "most_used",
    "optimize",
    "processors",
    "run",
    "shadow_prices",
    "simulate",
    "start",
    "sustained_rate",
    "sweep",
    "workloads",
]


_ON_FIRST_USE = {
    "workbench.analysis.advise": ("Advice", "advise"),
    "workbench.analysis.optimize": ("Optimum", "optimize"),
    "workbench.analysis.sweeps": ("Sweep", "sweep"),
    "workbench.engine": ("RunState", "calibrate", "make_checkpoint", "run", "start"),
    "workbench.jobs": ("LLM",),
}
"""Packages that take time to import, by the names that are taken from them: the engine brings torch and Numba."""


def __getattr__(name: str) -> Any:
    """Import a package on the first use of one of its names (PEP 562)."""
    for package, names in _ON_FIRST_USE.items():
        if name in names:
            return getattr(importlib.import_module(package), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")
