"""FOR WHOM: requests with their lengths and arrivals, tokenizers, and exams with exact answers.

Schedulers make batches of what a workload holds.
"""

from workbench.workload.workload import (
    AT_ONCE,
    PublishedWorkload,
    Request,
    Sampling,
    Times,
    Workload,
    byte_tokens,
    workloads,
)

__all__ = ["AT_ONCE", "PublishedWorkload", "Request", "Sampling", "Times", "Workload", "byte_tokens", "workloads"]
