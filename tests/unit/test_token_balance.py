"""Algorithm 2 loses no request and respects every limit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.errors import WorkloadError
from workbench.scheduler.token_balance import balance

lengths = st.lists(st.integers(1, 100), max_size=40)


@given(lengths, st.integers(1, 6), st.integers(1, 8), st.integers(1, 20), st.integers(0, 300))
def test_every_request_is_in_one_micro_batch_or_waits(prompts, batches, size, output, spare):
    cache = 120 + spare
    found = balance(prompts, micro_batches=batches, size=size, output_len=output, cache=cache)
    placed = [request for batch in found.micro_batches for request in batch]
    assert sorted(placed + found.aborted) == list(range(len(prompts)))
    assert len(found.micro_batches) <= batches
    for batch in found.micro_batches:
        assert 0 < len(batch) <= size
        assert sum(prompts[request] for request in batch) + len(batch) * output <= cache
        assert [prompts[request] for request in batch] == sorted((prompts[r] for r in batch), reverse=True)


def test_token_counts_of_micro_batches_differ_by_at_most_the_longest_prompt():
    prompts = np.random.default_rng(0).integers(1, 400, 60).tolist()
    found = balance(prompts, micro_batches=4, size=60, output_len=1, cache=10**6)
    sums = [sum(prompts[request] for request in batch) for batch in found.micro_batches]
    assert found.aborted == []
    assert max(sums) - min(sums) <= max(prompts)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"cache": 9}, "never fits"), ({"size": 0}, "size=0"), ({"micro_batches": 0}, "micro_batches=0")],
)
def test_a_request_that_could_never_be_placed_is_an_error(changed, message):
    asked = {"micro_batches": 2, "size": 3, "output_len": 4, "cache": 20} | changed
    with pytest.raises(WorkloadError, match=message):
        balance([6, 3], **asked)


def test_a_request_waits_if_its_micro_batch_has_no_room_for_what_all_generate():
    asked = {"micro_batches": 1, "size": 3, "output_len": 4}
    assert balance([6, 6], **asked, cache=19) == ([[0]], [1])
    assert balance([6, 6], **asked, cache=20) == ([[0, 1]], [])


def test_no_requests_make_no_micro_batch():
    assert balance([], micro_batches=2, size=3, output_len=1, cache=2) == ([], [])
