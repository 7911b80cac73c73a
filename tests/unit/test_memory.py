"""How much memory the policy gives, and in which precision."""

import pytest

from workbench.core.errors import CapacityError
from workbench.scenario import Memory


def test_capacity_is_cut_into_whole_blocks():
    assert Memory("70GB", kv_block=16).blocks(131_072) == 33_378
    assert Memory(1000, kv_block=3).blocks(100) == 3
    assert Memory(899, kv_block=3).blocks(100) == 2


@pytest.mark.parametrize("capacity", ["-70GB", -1, 0, "0GB", "much", float("nan")])
def test_a_capacity_that_is_not_positive_is_refused(capacity):
    with pytest.raises(CapacityError, match="kv_capacity"):
        Memory(capacity)


def test_a_capacity_that_is_not_given_is_refused():
    with pytest.raises(CapacityError, match="kv_capacity"):
        Memory(None)


@pytest.mark.parametrize("block", [0, -16])
def test_a_block_without_tokens_is_refused(block):
    with pytest.raises(CapacityError, match=f"kv_block.*at least 1, not {block}"):
        Memory("1GB", kv_block=block)


@pytest.mark.parametrize("block", [1.5, "16"])
def test_a_block_that_is_no_whole_number_is_refused(block):
    with pytest.raises(CapacityError, match="kv_block"):
        Memory("1GB", kv_block=block)


@pytest.mark.parametrize("which", ["weights", "kv"])
def test_an_unknown_precision_is_refused(which):
    with pytest.raises(CapacityError, match=rf"Memory\({which}='int3'\) is not supported; use 'fp32', 'bf16'"):
        Memory("1GB", **{which: "int3"})


def test_a_capacity_below_one_block_is_refused_with_both_sizes():
    with pytest.raises(
        CapacityError, match=r"'1MB' is smaller than one block of 16 tokens, which takes 2.1 MB.*smaller kv_block"
    ):
        Memory("1MB", kv_block=16).blocks(131_072)


@pytest.mark.parametrize("change", [{"kv": []}, {"kv_block": True}, {"kv_capacity": 10**400}, {"kv_capacity": True}])
def test_values_of_another_kind_are_refused(change):
    with pytest.raises(CapacityError, match=next(iter(change))):
        Memory(**{"kv_capacity": "1GB", **change})
