"""Digests of scenarios: two results with the same digest are of the same question."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from workbench.workload import Workload
from workbench.workload.lengths import Lengths

_WORKLOADS = 4
"""Workloads whose digest is kept for other scenarios with the same requests."""


def digest_of(workload: Workload, generated: Lengths, others: Iterable[object]) -> str:
    """Digest of a workload's lengths, tokens and arrivals, and of what else changes a number.

    `generated` (requests,) are the tokens that each request has generated.
    """
    digest = _digest_of_lengths(workload).copy()
    if (generated < workload.output_len).any():
        digest.update(generated.tobytes())
    digest.update(workload.arrival.tobytes())
    for other in (workload.requests, *others):
        digest.update(repr(other).encode())
    return digest.hexdigest()[:12]


@lru_cache(maxsize=_WORKLOADS)
def _digest_of_lengths(workload: Workload) -> hashlib._Hash:
    """The digest of a workload's lengths, for others to be added to a copy of it."""
    return hashlib.sha256(workload.prompt_len.tobytes() + workload.output_len.tobytes())
