"""Workloads: requests with their lengths and arrivals, tokenizers, and exams with exact answers.

Schedulers form batches of a workload's requests.
"""

from workbench.workload.request import Request, Sampling
from workbench.workload.routing import UNIFORM, Frequencies, Routing, Uniform
from workbench.workload.workload import (
    AT_ONCE,
    PublishedWorkload,
    Times,
    Workload,
    byte_tokens,
    workloads,
)

__all__ = [
    "AT_ONCE",
    "UNIFORM",
    "Frequencies",
    "PublishedWorkload",
    "Request",
    "Routing",
    "Sampling",
    "Times",
    "Uniform",
    "Workload",
    "byte_tokens",
    "workloads",
]
