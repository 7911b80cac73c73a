"""What is written down of tokens as they come, against a list of every request's tokens."""

from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.scheduler.batch import Batch
from workbench.schedules.plan import LANES
from workbench.serving.iterations import Record
from workbench.workload import Workload

REQUESTS = 5
NEW, PREEMPTED, RUNS = range(3)
iterations = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["rest", "go", "preempt"]), min_size=REQUESTS, max_size=REQUESTS), st.floats(0, 9)
    ),
    max_size=12,
)


def batch(prefills, decodes) -> Batch:
    columns = (prefills, [4] * len(prefills), decodes, [5] * len(decodes))
    return Batch(*(np.array(column, dtype=np.int64) for column in columns), layers=2)


@given(iterations)
def test_gaps_and_first_tokens_are_those_of_every_token(moves):
    """Requests go on, rest, or lose their cache and begin with a prefill again, in any order."""
    record, state = Record(Workload.lengths(4, 3, REQUESTS)), [NEW] * REQUESTS
    tokens: list[list[float]] = [[] for _ in range(REQUESTS)]
    now = 0.0
    for choices, seconds in moves:
        going = [request for request, choice in enumerate(choices) if choice == "go"]
        prefills = [request for request in going if state[request] != RUNS]
        decodes = [request for request in going if state[request] == RUNS]
        now, begin = now + seconds, now
        record.add(batch(prefills, decodes), begin, now, 0, dict.fromkeys(LANES, 0.0), 0.0)
        for request, choice in enumerate(choices):
            if choice == "go":
                tokens[request].append(now)
                state[request] = RUNS
            elif choice == "preempt" and state[request] == RUNS:
                state[request] = PREEMPTED
    served = [request for request in range(REQUESTS) if tokens[request]]
    record.finish(np.array(served, dtype=np.int64), now)
    found = record.latencies
    gaps = [[later - earlier for earlier, later in pairwise(tokens[request])] for request in served]
    assert found.request == tuple(served)
    assert found.first == tuple(tokens[request][0] for request in served)
    assert found.worst_gap == tuple(max(lengths, default=0.0) for lengths in gaps)
    assert dict(zip(found.gap, found.gap_count, strict=True)) == Counter(chain.from_iterable(gaps))


def test_nobody_served_has_no_latencies():
    found = Record(Workload.lengths(4, 3, REQUESTS)).latencies
    assert (found.request, found.gap, found.gap_count) == ((), (), ())


def test_first_tokens_of_the_served_are_told_as_a_mean():
    record = Record(Workload.lengths(4, 3, REQUESTS))
    for number, request in enumerate((2, 0)):
        record.add(batch([request], []), number, number + 1.0, 0, dict.fromkeys(LANES, 0.0), 0.0)
    assert record.mean_ttft == pytest.approx(1.5)
