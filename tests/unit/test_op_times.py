"""What is fitted to seen times gives them back, and its parts stand for what they say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.cost import Rows, measured_seconds
from workbench.engine.op_times import Seen, typical

PROMPTS = ((1, 1), (1, 16), (4, 8), (1, 64), (8, 8), (16, 16), (1, 256), (2, 256), (8, 128))
DECODES = ((1, 256), (4, 64), (16, 16), (16, 512), (64, 16), (64, 256), (128, 128))


def prompts(count: int, length: int) -> Rows:
    return Rows(prefill=count * length, pairs=count * length * (length + 1) / 2, emits=count)


def decodes(count: int, held: int) -> Rows:
    return Rows(decode=count, context=count * held, emits=count)


def test_times_are_typical_of_their_rows_and_linear_between_them():
    seen = Seen("experts", 1)
    for rows, seconds in ((10, 1.0), (10, 3.0), (20, 4.0)):
        seen.note(Rows(prefill=rows), seconds)
    time = seen.time()
    assert (time.op, time.threads) == ("experts", 1)
    assert [measured_seconds(time, Rows(decode=n)) for n in (10, 15, 20, 30)] == [2.0, 3.0, 4.0, 6.0]


def test_more_rows_never_take_less_time_and_what_fell_is_averaged():
    seen = Seen("qkv", 1)
    for rows, seconds in ((1, 1.0), (2, 3.0), (3, 2.0), (4, 5.0)):
        seen.note(Rows(prefill=rows), seconds)
    assert seen.time().seconds == (1.0, 2.5, 2.5, 5.0)


def test_calls_without_rows_tell_nothing():
    seen = Seen("qkv", 1)
    for rows, seconds in ((0, 9.0), (1, 1.0), (2, 2.0)):
        seen.note(Rows(prefill=rows), seconds)
    assert seen.time().tokens == (1.0, 2.0)


@given(st.tuples(*[st.floats(1e-7, 1e-3)] * 3))
def test_prefill_attention_is_taken_apart_into_prompts_tokens_and_pairs(truth):
    prompt, token, pair = truth
    seen = Seen("prefill_attention", 1)
    for shape in PROMPTS:
        rows = prompts(*shape)
        seen.note(rows, prompt * rows.emits + token * rows.prefill + pair * rows.pairs)
    time = seen.time()
    for shape in ((3, 40), (1, 700)):
        rows = prompts(*shape)
        expected = prompt * rows.emits + token * rows.prefill + pair * rows.pairs
        assert measured_seconds(time, rows) == pytest.approx(expected, rel=1e-6)


@given(st.tuples(*[st.floats(1e-6, 1e-3)] * 4))
def test_decode_attention_is_taken_apart_into_appending_calls_decodes_and_entries(truth):
    append, call, decode, entry = truth
    seen = Seen("decode_attention", 2)
    for shape in PROMPTS:
        seen.note(Rows(prefill=prompts(*shape).prefill), append * prompts(*shape).prefill)
    for count, held in DECODES:
        seen.note(decodes(count, held), append * count + call + decode * count + entry * count * held)
    time = seen.time()
    mixed = Rows(prefill=50, decode=30, context=3000, emits=31)
    expected = append * 80 + call + decode * 30 + entry * 3000
    assert measured_seconds(time, mixed) == pytest.approx(expected, rel=1e-3)


def test_no_coefficient_is_negative():
    seen = Seen("prefill_attention", 1)
    for number, shape in enumerate(PROMPTS):
        seen.note(prompts(*shape), 1e-3 / (1 + number))
    time = seen.time()
    assert min(time.per_prompt, time.per_pair, *time.seconds) >= 0


def test_one_slow_call_in_ten_does_not_count_and_steady_ones_do():
    assert typical([1.0] * 9 + [50.0]) == 1.0
    assert typical([1.0, 3.0]) == 2.0
    assert typical(list(np.arange(20.0))) == pytest.approx(9.5)
