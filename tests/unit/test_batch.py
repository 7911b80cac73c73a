"""Who is in an iteration: rectangles, and the rows that a batch puts on the stages."""

import pytest

from tests.builders import make_batch
from tests.systems import MIXED
from workbench.cost import Rows
from workbench.scheduler.batch import Batch


def test_a_batch_is_its_rectangles():
    first, *_, last = MIXED
    assert first == (4, 0, 5, range(2), True)
    assert last == (3, 2, 3, range(2), True)
    assert len(list(MIXED)) == len(MIXED) == 6


def test_rows_count_each_class_apart():
    rows = make_batch([5, 4], [7, 6, 3, 2]).rows
    assert rows == Rows(prefill=9, decode=4, pairs=15 + 10, context=8 + 7 + 4 + 3, emits=6)
    assert rows.tokens == 13


def test_pairs_are_the_causal_ones():
    assert make_batch([1]).rows.pairs == 1
    assert make_batch([100]).rows.pairs == sum(range(1, 101))


def test_rows_of_an_empty_batch_are_zero():
    assert make_batch().rows == Rows()


def test_rows_of_parts_add_up():
    whole = make_batch([5, 4], [7, 6, 3])
    parts = make_batch([5], [7, 6]).rows.plus(make_batch([4], [3]).rows)
    assert parts == whole.rows


def test_equal_batches_hash_alike():
    assert make_batch([3], [5]) == make_batch([3], [5])
    assert hash(make_batch([3], [5])) == hash(make_batch([3], [5]))
    assert make_batch([3], [5]) != make_batch([3], [6])
    assert make_batch([3], layers=2) != make_batch([3], layers=3)
    assert make_batch([3]) != "batch"


def test_requests_are_named_prefills_first():
    assert MIXED.requests.tolist() == [4, 5, 0, 1, 2, 3]


def test_a_batch_describes_itself():
    assert MIXED.describe() == "9 prefill + 4 decode tokens of 6 requests"


def test_a_batch_cannot_be_changed():
    with pytest.raises(AttributeError):
        make_batch([1]).layers = 3
    assert isinstance(MIXED, Batch)
