"""What work costs: rooflines and copies."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import op_times, small_machine, tiny_model
from workbench.hardware.profile import OpTime
from workbench.stages import Rows, Work, copy_seconds, least_seconds, measured_seconds, seconds

GPU = small_machine(gpu=1e9, hbm=1e6).gpu
SLOW_START = small_machine(gpu=1e9, hbm=1e6, overhead=0.5).gpu


def in_turn(works, device):
    """Operations that run one after the other."""
    return sum(seconds(work, device) for work in works)


def test_an_operation_takes_as_long_as_its_slower_side():
    assert in_turn([Work(2e9, 1e6)], GPU) == 2.0
    assert in_turn([Work(1e9, 3e6)], GPU) == 3.0


def test_operations_run_one_after_the_other():
    assert in_turn([Work(2e9, 0), Work(0, 3e6)], GPU) == 5.0


def test_every_operation_pays_the_fixed_time_and_an_empty_one_nothing():
    assert in_turn([Work(1e9, 0), Work(), Work(1e9, 0)], SLOW_START) == 3.0
    assert in_turn([Work()], SLOW_START) == 0
    assert in_turn([], SLOW_START) == 0


def test_each_precision_has_its_rate():
    device = replace(GPU, flops=(("bf16", 2e9), ("fp32", 1e9)))
    assert in_turn([Work(2e9, 0, "bf16")], device) == 1.0
    assert in_turn([Work(2e9, 0, "fp32")], device) == 2.0


def test_a_copy_takes_its_bytes_and_the_fixed_time():
    assert copy_seconds(6e9, 2e9) == 3.0
    assert copy_seconds(6e9, 2e9, 0.25) == 3.25
    assert copy_seconds(0, 2e9, 0.25) == 0


def test_rows_add_component_by_component():
    assert Rows(1, 2, 3, 4, 5).plus(Rows(10, 20, 30, 40, 50)) == Rows(11, 22, 33, 44, 55)
    assert Rows(1, 2).tokens == 3


def touched(experts, chosen, tokens):
    model = tiny_model(num_local_experts=experts, num_experts_per_tok=chosen)
    return model.touched_experts(tokens)


def test_experts_touched_by_uniform_tokens():
    """MoE-CAP: E (1 - (1 - k/E)^T)."""
    assert touched(8, 2, 1) == pytest.approx(2)
    assert touched(8, 2, 2) == pytest.approx(3.5)
    assert touched(8, 2, 10_000) == pytest.approx(8)
    assert touched(8, 2, 0) == 0
    assert touched(128, 8, 32) / 128 == pytest.approx(0.873, abs=1e-3)


CURVE = OpTime("qkv", 1, (2.0, 4.0, 8.0), (1.0, 2.0, 6.0))


POINTS = [(0, 0), (0.25, 0.25), (1, 1), (2, 1), (3, 1.5), (4, 2), (6, 4), (8, 6), (10, 8)]
"""Tokens and seconds: a share below one token, flat before the curve, linear between its points and beyond them."""


@pytest.mark.parametrize(("tokens", "expected"), POINTS)
def test_a_measured_time_follows_its_points(tokens, expected):
    assert measured_seconds(CURVE, Rows(prefill=tokens)) == expected
    assert measured_seconds(CURVE, Rows(decode=tokens)) == expected


def test_prompts_pairs_decodes_and_entries_add_to_a_measured_time():
    time = replace(CURVE, per_prompt=10.0, per_pair=100.0, per_context=1e4)
    rows = Rows(prefill=3, decode=1, pairs=6, context=5, emits=2)
    assert measured_seconds(time, rows) == 2.0 + 10 + 600 + 5e4
    assert measured_seconds(time, Rows(prefill=4, emits=1)) == 2.0 + 10


def test_decodes_have_points_of_their_own_and_prefills_beside_them_add_what_they_add_to_as_many_tokens():
    time = replace(CURVE, per_context=1e4, decodes=(1.0, 4.0), decode_seconds=(0.5, 3.5))
    assert [measured_seconds(time, Rows(decode=n, context=n)) for n in (1, 2, 4, 5)] == [
        10000.5,
        20001.5,
        40003.5,
        50004.5,
    ]
    assert measured_seconds(time, Rows(prefill=4)) == 2.0
    assert measured_seconds(time, Rows(prefill=4, decode=4)) == 3.5 + (6.0 - 2.0)


PARTS = [(8, 0.5, 4.5), (8, 0.25, 3.5), (20, 0.05, 3.0), (3, 0.5, 1.25), (8, 1.0, 6.5), (40, 0.5, 12.5)]
"""Decodes, the share of their experts that is computed, and seconds: of many rows the line through 5 and 10 tokens."""


@pytest.mark.parametrize(("decodes", "share", "expected"), PARTS)
def test_a_part_of_the_experts_of_many_rows_takes_no_kernel_for_few_rows(decodes, share, expected):
    time = OpTime("experts", 1, (1.0, 4.0, 5.0, 10.0), (1.0, 2.5, 5.0, 7.5), few=4.0)
    assert measured_seconds(time, Rows(decode=decodes), share) == pytest.approx(expected)


def test_tokens_beside_decodes_may_cost_nothing_where_times_are_flat_before_the_first_point():
    time = OpTime("decode_attention", 1, (4.0, 8.0), (1.0, 3.0), decodes=(1.0, 2.0), decode_seconds=(1.0, 1.5))
    rows = Rows(prefill=3, decode=1)
    assert least_seconds(time, rows) <= measured_seconds(time, rows) == 1.0


counts = st.tuples(*[st.integers(0, 400)] * 4)


@given(
    st.sampled_from(["experts", "prefill_attention", "decode_attention"]).flatmap(lambda op: op_times(op, 1)),
    st.lists(counts, min_size=1, max_size=6),
    st.sampled_from([1.0, 0.5, 0.1]),
)
def test_no_split_into_calls_takes_less_than_the_least(time, parts, share):
    calls = [Rows(p, d, pairs, context, d + (p > 0)) for p, d, pairs, context in parts]
    whole = Rows()
    for call in calls:
        whole = whole.plus(call)
    taken = sum(measured_seconds(time, call, share) for call in calls if call.tokens)
    extras = sum(time.per_pair * call.pairs + time.per_context * call.context for call in calls if not call.tokens)
    assert least_seconds(time, whole, share) <= (taken + extras) * (1 + 1e-9) + 1e-15
