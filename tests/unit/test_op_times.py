"""What is fitted to seen times gives them back, and its parts stand for what they say."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.timeline import Span
from workbench.engine.calibration.op_times import (
    LEAST_SPREAD,
    Seen,
    contention,
    op_times,
    per_unit,
    rest,
    spread,
    typical,
)
from workbench.engine.calibration.timed import Call, Pass
from workbench.hardware.profile import Contention, Cores
from workbench.stages import Rows, measured_seconds

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


def test_times_of_numbers_near_one_another_do_not_tilt_what_follows():
    seen = Seen("combine", 1)
    for rows, seconds in ((500, 1.0), (1037, 2.0), (1048, 2.2)):
        seen.note(Rows(prefill=rows), seconds)
    assert measured_seconds(seen.time(), Rows(prefill=10_000)) == pytest.approx(20.0, rel=0.1)


def test_calls_without_rows_tell_nothing():
    seen = Seen("qkv", 1)
    for rows, seconds in ((0, 9.0), (1, 1.0), (2, 2.0)):
        seen.note(Rows(prefill=rows), seconds)
    assert seen.time().tokens == (1.0, 2.0)


@given(st.tuples(*[st.floats(1e-7, 1e-3)] * 4))
def test_prefill_attention_is_taken_apart_into_calls_prompts_tokens_and_pairs(truth):
    call, prompt, token, pair = truth
    seen = Seen("prefill_attention", 1)
    for shape in PROMPTS:
        rows = prompts(*shape)
        seen.note(rows, call + prompt * rows.emits + token * rows.prefill + pair * rows.pairs)
    time = seen.time()
    for shape in ((3, 40), (1, 700)):
        rows = prompts(*shape)
        expected = call + prompt * rows.emits + token * rows.prefill + pair * rows.pairs
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


def test_a_few_decodes_may_take_less_than_as_many_rows_of_prompts():
    seen = Seen("decode_attention", 1)
    for shape in PROMPTS:
        seen.note(Rows(prefill=prompts(*shape).prefill), 4e-4)
    shapes = ((1, 251), (4, 67), (5, 131), (15, 19), (15, 507))
    truth = {shape: (2e-4 if shape[0] <= 4 else 1e-3) + 1e-7 * shape[0] * shape[1] for shape in shapes}
    for shape, seconds in truth.items():
        seen.note(decodes(*shape), seconds)
    time = seen.time()
    assert [measured_seconds(time, decodes(*shape)) for shape in shapes] == pytest.approx(
        list(truth.values()), rel=1e-6
    )


def test_no_coefficient_is_negative():
    seen = Seen("prefill_attention", 1)
    for number, shape in enumerate(PROMPTS):
        seen.note(prompts(*shape), 1e-3 / (1 + number))
    time = seen.time()
    assert min(time.per_prompt, time.per_pair, *time.seconds) >= 0


def test_repetitions_that_scatter_do_not_pull_the_times_down():
    random = np.random.default_rng(0)
    features = [[1.0, float(rows)] for rows in (1, 10, 100) for _ in range(200)]
    seconds = [(2.0 + 0.1 * rows) * random.uniform(0.5, 1.5) for _, rows in features]
    assert per_unit(features, seconds) == pytest.approx((2.0, 0.1), rel=0.05)


def test_one_slow_call_in_ten_does_not_count_and_steady_ones_do():
    assert typical([1.0] * 9 + [50.0]) == 1.0
    assert typical([1.0, 3.0]) == 2.0
    assert typical(list(np.arange(20.0))) == pytest.approx(9.5)


def calls(lane: str, count: int, wall: float, *, op: str = "experts", tokens: int = 8, resident: bool = False):
    """Calls of one operation, each as long as the others."""
    return [Call(op, lane, 1, resident, Rows(prefill=tokens), wall, wall) for _ in range(count)]


def plan(gpu: float, cpu: float, *, tokens: int, count: int, share: float = 1.0) -> Pass:
    """A plan in which each lane has so many tasks of these seconds; cpu's last for this share of gpu's."""
    spans = [Span("gpu", f"A{n}", n * gpu, (n + 1) * gpu) for n in range(count)]
    spans += [Span("cpu", f"C{n}", n * gpu, n * gpu + share * gpu) for n in range(count)]
    seen = calls("gpu", count, gpu, tokens=tokens) + calls("cpu", count, cpu, op="combine", tokens=tokens)
    return Pass(seen, spans, [])


@given(st.floats(0, 2))
def test_what_the_other_lane_costs_is_told_by_plans_in_which_both_work(growth):
    sizes = (8, 16, 32, 64)
    alone = [
        call for n in sizes for op in ("experts", "combine") for call in calls("gpu", 2, 1e-3 * n, op=op, tokens=n)
    ]
    seen = []
    for tokens in sizes:
        for share in (0.01, 0.25, 1.0):
            seconds = 1e-3 * tokens
            longer = seconds * (3.0 if share < 0.25 else 1 + share * growth)  # what barely overlaps tells nothing
            seen.append(plan(longer, seconds, tokens=tokens, count=4, share=share))
    found = contention(seen, op_times(alone), Cores.of(2), 1e9)
    assert found.gpu == pytest.approx(growth, abs=1e-6)
    assert found.cpu == pytest.approx(0, abs=1e-9)
    assert contention([], op_times(alone), Cores.of(2), 1e9) == Contention()


@given(st.floats(0, 1e-2), st.booleans(), st.booleans())
def test_what_a_task_of_another_lane_costs_is_the_lanes_wait_for_it(wait, mover, spare):
    """The gpu lane's clock runs on while its thread waits; what the movers take of the cpu lane is known."""
    sizes = (8, 16, 32, 64)
    alone = [
        call for n in sizes for op in ("experts", "combine") for call in calls("gpu", 2, 1e-3 * n, op=op, tokens=n)
    ]
    cores = replace(Cores.of(2), mover=5e-10 if mover else 0.0, spare=int(spare))
    taken = 0.5 if mover and not spare else 0.0
    seen = []
    for tokens in sizes:
        one = plan(1e-3 * tokens, 1e-3 * tokens, tokens=tokens, count=4)
        one.calls[:] = [
            call._replace(wall=call.cpu + wait + (taken * 1e-3 * tokens if call.lane == "cpu" else 0.0))
            for call in one.calls
        ]
        one.spans.append(Span("h2d", "W1", 0.0, 4e-3 * tokens))
        seen.append(one)
    found = contention(seen, op_times(alone), cores, 1e9)
    assert found.gpu_wait == pytest.approx(wait * 4 / 5, abs=1e-9)
    assert found.cpu_wait == pytest.approx(wait * 4 / 5, abs=1e-9)
    assert found.gpu == found.cpu == pytest.approx(0, abs=1e-9)


def both(lane: str, factor: float = 1.0, *, resident: bool = False) -> list[Call]:
    """Calls of 8 tokens and of 16, a millisecond per 8."""
    few = calls(lane, 1, 1e-3 * factor, tokens=8, resident=resident)
    return few + calls(lane, 1, 2e-3 * factor, tokens=16, resident=resident)


def test_weights_that_stay_where_they_are_have_times_of_their_own():
    times = op_times([*both("gpu", 2.0), *both("cpu", 1.0, resident=True)])
    assert {(time.op, time.resident): time.seconds for time in times} == {
        ("experts", False): pytest.approx((2e-3, 4e-3)),
        ("experts", True): pytest.approx((1e-3, 2e-3)),
    }


def test_the_interval_is_as_wide_as_rounds_drift_and_plans_are_off():
    ops = op_times(both("gpu"))
    steady = [Pass(both("gpu"), [], [])] * 4
    least = np.exp(1.645 * LEAST_SPREAD)
    assert spread([steady, steady], ops) == pytest.approx((1 / least, least))
    drifting = [Pass(both("gpu", factor), [], []) for factor in (0.9, 1.1, 0.9, 1.1)]
    low, high = spread([drifting, drifting], ops)
    assert high == pytest.approx(np.exp(1.645 * np.std(np.log([0.9, 1.1]))))
    assert low == pytest.approx(1 / high)
    plans = [[Pass(both("gpu", factor), [], [])] * 4 for factor in (0.9, 1.0, 1.1, 1.0 / 0.9, 5.0)]
    assert spread(plans, ops)[1] == pytest.approx(np.exp(1.645 * 1.4826 * np.log(1.1)), rel=0.02)


def test_typical_leaves_out_the_fastest_and_the_slowest_of_three():
    assert typical([1.0, 2.0, 90.0]) == 2.0
    assert typical([1.0, 3.0]) == 2.0
    assert typical([4.0]) == 4.0
    assert typical([*range(20), 1e9]) == pytest.approx(np.mean(range(2, 19)))


def test_lanes_that_share_a_core_slow_one_another_down_and_wait_for_nothing():
    alone = [
        call for n in (8, 16) for op in ("experts", "combine") for call in calls("gpu", 2, 1e-3 * n, op=op, tokens=n)
    ]
    seen = []
    for tokens in (8, 16):
        one = plan(1e-3 * tokens, 1e-3 * tokens, tokens=tokens, count=4)
        one.calls[:] = [call._replace(wall=2 * call.cpu) for call in one.calls]
        seen.append(one)
    found = contention(seen, op_times(alone), Cores.of(1), 1e9)
    assert (found.gpu, found.cpu) == pytest.approx((1.0, 1.0))
    assert found.gpu_wait == found.cpu_wait == 0


def test_a_rest_is_what_plans_that_wait_take_longer():
    ops = op_times([call for n in (8, 16, 32) for call in calls("gpu", 4, 1e-3 * n, tokens=n)])
    waited = [Pass(calls("gpu", 3, 1e-3 * n + 1e-4, tokens=n), [], []) for n in (8, 16, 32)]
    assert rest(waited, ops) == pytest.approx(3e-4)
    assert rest([Pass(calls("gpu", 3, 1e-4), [], [])], ops) == 0
