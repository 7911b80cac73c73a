"""Who is in an iteration: rectangles, and the rows that a batch puts on the stages."""

import numpy as np
import pytest

from tests.builders import make_batch
from tests.systems import MIXED, ids
from workbench.scheduler.batch import NONE, Batch, Cut, Hint
from workbench.schedules.base import balanced
from workbench.stages import Rows


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


# ------------------------------------------------------------------------------------------------ pieces of prompts


def pieces(starts, sizes, emits, contexts=(), *, passed=range(4), layers=4):
    """Prefills that start somewhere and pass some of the layers, beside decodes."""
    whole = make_batch(sizes, contexts, layers=layers)
    cut = Cut(ids(*starts), passed, np.array(emits, dtype=bool))
    return Batch(whole.prefills, whole.prefill_len, whole.decodes, whole.context, layers, cut)


def test_a_piece_is_a_rectangle_of_tokens_and_layers():
    batch = pieces([3, 0], [5, 2], [True, False], [7], passed=range(1, 3))
    assert list(batch) == [
        (0, 3, 8, range(1, 3), True),
        (1, 0, 2, range(1, 3), False),
        (2, 7, 8, range(4), True),
    ]
    assert batch.emitting.tolist() == [0, 2]
    assert batch.describe() == "7 prefill + 1 decode tokens of 3 requests, prefills in layers 1 to 2"


def test_pieces_attend_to_what_went_before_and_sum_up_to_the_whole_prompt():
    """A piece from token s on of n tokens has the pairs of s + 1, s + 2, ..., s + n."""
    assert pieces([3], [2], [False]).rows == Rows(prefill=2, pairs=4 + 5, emits=0, before=3)
    whole = make_batch([9]).rows
    parts = [pieces([start], [3], [start == 6]).rows for start in (0, 3, 6)]
    total = parts[0].plus(parts[1]).plus(parts[2])
    assert (total.prefill, total.pairs, total.emits) == (whole.prefill, whole.pairs, whole.emits)


@pytest.mark.parametrize(
    ("passed", "with_prefills", "leaving"),
    [(range(4), [-1, 0, 1, 2, 3, 4], 5), (range(2), [-1, 0, 1], 0), (range(1, 3), [1, 2], 0), (range(3, 4), [3, 4], 5)],
)
def test_prefills_are_there_in_their_layers_and_at_the_ends_that_adjoin_them(passed, with_prefills, leaving):
    batch = pieces([0], [5], [False], [2, 3], passed=passed)
    assert [place for place in range(-1, 5) if batch.at(place) is batch] == with_prefills
    assert batch.at(1 if 1 not in passed else (set(range(4)) - {*passed} or {0}).pop()).decodes.tolist() == [1, 2]
    assert batch.decodes_alone == Batch(NONE, NONE, ids(1, 2), ids(2, 3), 4)
    assert batch.leaving == leaving


def test_parts_of_pieces_are_pieces():
    batch = pieces([3, 0, 0], [5, 2, 4], [True, False, False], [7, 6], passed=range(2))
    parts = balanced(batch, 2)
    assert sorted(rectangle for part in parts for rectangle in part) == sorted(batch)
    assert parts[0].cut is not None


def test_a_hint_for_as_many_parts_decides_the_split():
    batch = make_batch([5, 5], [7, 6, 3])
    told = Batch(batch.prefills, batch.prefill_len, batch.decodes, batch.context, 2, None, Hint(ids(1, 1, 0, 0, 1), 2))
    assert [part.requests.tolist() for part in balanced(told, 2)] == [[2, 3], [0, 1, 4]]
    assert balanced(told, 3) == balanced(batch, 3)
