"""Paged KV memory: what it hands out, what it refuses, and that a refusal takes nothing."""

import numpy as np
import pytest

from tests.systems import ids
from workbench.core.errors import CapacityError
from workbench.scheduler.block_manager import BlockManager


@pytest.fixture
def blocks() -> BlockManager:
    return BlockManager(blocks=10, block_size=4, sequences=5, longest=24)


def table(blocks, sequence):
    return blocks.table[sequence, : blocks.held[sequence]].tolist()


def test_a_sequence_gets_as_many_blocks_as_its_tokens_fill(blocks):
    blocks.allocate(ids(0, 1, 2), ids(4, 5, 1))
    assert blocks.held.tolist() == [1, 2, 1, 0, 0]
    assert (blocks.free, blocks.used) == (6, 4)


def test_no_two_sequences_share_a_block(blocks):
    blocks.allocate(ids(3, 1), ids(9, 12))
    blocks.append(ids(1, 3))
    handed = table(blocks, 1) + table(blocks, 3)
    assert len(handed) == len(set(handed)) == 8
    assert set(handed) <= set(range(10))


def test_appending_keeps_the_earlier_blocks_in_place(blocks):
    blocks.allocate(ids(2), ids(8))
    before = table(blocks, 2)
    blocks.append(ids(2))
    assert table(blocks, 2)[:2] == before
    assert len(table(blocks, 2)) == 3


def test_released_blocks_are_handed_out_again(blocks):
    blocks.allocate(ids(0), ids(24))
    blocks.release(ids(0))
    assert (blocks.free, blocks.used) == (10, 0)
    blocks.allocate(ids(1, 2), ids(16, 24))
    assert blocks.free == 0
    blocks.check()


def test_releasing_a_sequence_without_blocks_changes_nothing(blocks):
    blocks.release(ids(0, 1))
    assert blocks.free == 10


@pytest.mark.parametrize(
    ("sequences", "tokens"),
    [
        pytest.param(ids(1, 2), ids(24, 20), id="more than is free"),
        pytest.param(ids(1), ids(25), id="longer than a table"),
        pytest.param(ids(1, 0), ids(1, 1), id="one that holds blocks already"),
    ],
)
def test_an_allocation_that_is_refused_takes_nothing(blocks, sequences, tokens):
    blocks.allocate(ids(0), ids(4))
    with pytest.raises(CapacityError, match=r"ask for \d+ blocks; 9 are free.*Free some sequence first"):
        blocks.allocate(sequences, tokens)
    assert (blocks.free, blocks.held.tolist()) == (9, [1, 0, 0, 0, 0])
    blocks.check()


def test_an_append_that_is_refused_takes_nothing(blocks):
    blocks.allocate(ids(0, 1), ids(20, 20))
    with pytest.raises(CapacityError, match=r"2 sequences ask for one block each; 0 are free.*Preempt"):
        blocks.append(ids(0, 1))
    assert blocks.held.tolist() == [5, 5, 0, 0, 0]
    blocks.check()


def test_a_full_table_refuses_another_block(blocks):
    blocks.allocate(ids(0), ids(24))
    with pytest.raises(CapacityError):
        blocks.append(ids(0))
    blocks.check()


@pytest.mark.parametrize(
    ("sequences", "tokens"),
    [
        pytest.param(ids(0), ids(-5), id="negative length"),
        pytest.param(ids(0, 1), ids(3), id="lengths for half of them"),
        pytest.param(ids(7), ids(3), id="unknown sequence"),
    ],
)
def test_nonsense_raises_and_leaves_the_blocks_alone(blocks, sequences, tokens):
    with pytest.raises((ValueError, IndexError)):
        blocks.allocate(sequences, tokens)
    assert (blocks.free, blocks.used) == (10, 0)
    blocks.check()


def test_a_lost_block_is_noticed(blocks):
    blocks.allocate(ids(0), ids(8))
    blocks.held[0] = 1
    with pytest.raises(CapacityError, match="not conserved: 8 free and 1 held of 10"):
        blocks.check()


def test_a_block_handed_out_twice_is_noticed(blocks):
    blocks.allocate(ids(0), ids(8))
    blocks.table[0, 1] = blocks.table[0, 0]
    with pytest.raises(CapacityError, match="not conserved"):
        blocks.check()


def test_nobody_and_nothing_is_a_valid_request(blocks):
    blocks.append(ids())
    blocks.allocate(ids(), ids())
    blocks.release(ids())
    assert np.array_equal(blocks.held, np.zeros(5))
