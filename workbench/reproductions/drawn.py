"""Statistics of lengths that the workbench draws for a data set, to compare with the published ones."""

from __future__ import annotations

from workbench.reproductions.rows import Inputs, Value
from workbench.workload import workloads

REQUESTS = 20_000


def drawn(given: Inputs) -> Value:
    """A statistic of the prompts drawn for a data set, such as their mean or max [tokens]."""
    lengths = workloads[given["workload"]].sample(requests=REQUESTS, output_len=1, seed=0).prompt_len
    return float(getattr(lengths, given["of"])())
