"""The bound: lane loads and the iterations that the KV cache forces."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import scenarios, small_machine, tiny_model, tiny_scenario
from tests.examples import examples
from tests.systems import PIPELINES
from workbench.analysis.compare import compare
from workbench.core.errors import CapacityError, ScheduleError
from workbench.core.result import Source
from workbench.perfmodels import bound
from workbench.perfmodels.bound import ARRIVAL, _least, least_forced, least_iterations, recomputed, total_rows
from workbench.perfmodels.loads import _PREFILL, Loads, _highest, _Term, _Way, crowds
from workbench.pipeline import cpu, gpu, load, offload
from workbench.scheduler.base import most_running
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules import KTransformers, Sequential, VSLPipe
from workbench.serving import prepare
from workbench.simulate import simulate
from workbench.stages import attention, combine, experts, out_proj, qkv, route
from workbench.workload import Workload

FAST = {"gpu": 1e15, "hbm": 1e15, "cpu": 1e15, "dram": 1e15, "h2d": 1e15, "d2h": 1e15}


def test_a_bound_says_so_and_names_its_limit():
    result = bound(tiny_scenario(requests=3), VSLPipe())
    assert result.source is Source.BOUND
    assert result.seconds == max(result.limits.values()) == result.limits[result.binding]
    assert (result.generated, result.processed) == (12, 3 * 11)


def test_threads_that_ask_for_the_same_calls_at_once_keep_each_once():
    def slow(rows):
        time.sleep(1e-4)  # the other thread goes on
        return rows.prefill

    known = {}
    terms = [_Term("gpu compute", (_Way(slow, slow),), 0, 1, tiny_model(), known) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda term: term._calls(_PREFILL, 40), terms))
    assert (both[0] == both[1]).all()
    assert (np.diff(both[0]) > 0).all()
    assert list(known.values()) == [tuple(both[0])]


def test_the_cache_or_the_longest_output_forces_the_iterations():
    workload = Workload.lengths([4, 4], [4, 9])
    assert least_iterations(workload, blocks=1000, block=4) == 9
    held = sum(-(-(4 + i) // 4) for output in (4, 9) for i in range(output))
    assert least_iterations(workload, blocks=1, block=4) == held
    assert least_iterations(workload, blocks=2, block=4) == -(-held // 2)


def test_rows_of_all_requests_are_what_an_undisturbed_run_puts_on_the_stages():
    scenario = tiny_scenario([5, 9, 3], [4, 1, 6])
    rows, result = total_rows(scenario.workload, scenario.model), simulate(scenario, Sequential())
    assert (rows.prefill, rows.decode) == (sum(result.steps.prefill), sum(result.steps.decode))
    assert rows.emits == 11
    assert rows.pairs == 15 + 45 + 6
    assert rows.context == sum(5 + i for i in (1, 2, 3)) + sum(3 + i for i in (1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("slow", "binding"),
    [
        ("gpu", "gpu compute"),
        ("cpu", "cpu compute"),
        ("dram", "DRAM bandwidth"),
        ("d2h", "d2h link"),
        ("h2d", "h2d link"),
    ],
)
def test_the_slowest_lane_binds(slow, binding):
    scenario = tiny_scenario([8] * 4, [4] * 4, machine=small_machine(**FAST | {slow: 1e4}))
    assert bound(scenario, VSLPipe()).binding == binding


@pytest.mark.parametrize("slow", ["gpu", "hbm", "dram", "d2h", "h2d"])
def test_a_run_on_one_slow_lane_reaches_the_bound(slow):
    """With ample KV and one part nothing is computed twice and no other lane takes time: the bound is met."""
    machine = small_machine(**FAST | {slow: 1e4})
    scenario = tiny_scenario([8] * 4, [1] * 4, machine=machine, token_budget=1000)
    least, simulated = bound(scenario, Sequential()), simulate(scenario, Sequential())
    assert simulated.seconds == pytest.approx(least.seconds, rel=1e-4)


def test_weights_stream_once_per_iteration():
    scenario = tiny_scenario([4], [10], machine=small_machine(**FAST | {"h2d": 1e6}))
    model = scenario.model
    streamed = 10 * model.num_hidden_layers * model.layer_params * 2
    outputs = model.num_hidden_layers * 9 * model.q_size * 2  # none, if every decode were recomputed as a prefill
    assert streamed / 1e6 <= bound(scenario, VSLPipe()).limits["h2d link"] <= (streamed + outputs) / 1e6


def test_the_hosts_memory_carries_attention_and_both_directions_of_the_link():
    scenario = tiny_scenario([4] * 2, [1] * 2, machine=small_machine(dram=1e6))
    model, size = scenario.model, 2
    kept = 8 * 2 * model.kv_size * (size + 4)  # 8 tokens' keys and values, in fp32 as they come and in bf16 as kept
    back = 8 * 2 * model.kv_size * size  # they cross the link in bf16
    streamed = model.layer_params * size
    found = bound(scenario, VSLPipe()).limits["DRAM bandwidth"]
    assert found == pytest.approx(model.num_hidden_layers * (kept + back + streamed) / 1e6)


def test_resident_weights_do_not_cross_the_link():
    assert bound(tiny_scenario(pipeline=PIPELINES["all_gpu"]), Sequential()).limits["h2d link"] == 0


def all_gpu(requests: int, *, blocks: int = 1000):
    """Decodes whose time is that of reading the weights."""
    machine = small_machine(**FAST | {"hbm": 1e6})
    return tiny_scenario([1] * requests, [9] * requests, pipeline=PIPELINES["all_gpu"], machine=machine, blocks=blocks)


@pytest.mark.parametrize("requests", [2, 8, 32])
def test_sequences_that_decode_together_share_what_is_read(requests):
    scenario = all_gpu(requests)
    share = bound(scenario, Sequential()).seconds / simulate(scenario, Sequential()).seconds
    assert 0.95 <= share <= 1


def test_a_cache_for_fewer_sequences_asks_for_more_reading():
    """12 requests of up to 9 tokens, 3 blocks: with 6 blocks half as many decode at once as with 12."""
    least = {blocks: bound(all_gpu(12, blocks=blocks), Sequential()).seconds for blocks in (6, 12, 36)}
    played = {blocks: simulate(all_gpu(12, blocks=blocks), Sequential()).seconds for blocks in least}
    assert least[36] < least[12] < least[6]
    assert all(0.7 * played[blocks] <= least[blocks] <= played[blocks] for blocks in least)


@pytest.mark.parametrize("most", [1, 4, 16])
def test_a_limit_on_the_running_sequences_asks_for_more_reading(most):
    scenario = all_gpu(32).on(scheduler=ResourceAware(max_running=most))
    least, played = bound(scenario, Sequential()), simulate(scenario, Sequential())
    assert least.iterations == played.iterations == 9 * 32 // most
    assert 0.95 <= least.seconds / played.seconds <= 1
    assert bound(scenario.on(scheduler=ResourceAware(max_running=32)), Sequential()).seconds < least.seconds


def test_a_limit_on_the_running_sequences_streams_weights_for_prompts_more_often():
    """Six prompts, two at a time, need three iterations, each with all experts of prompts."""
    workload = Workload.lengths([4] * 6, [1] * 6)
    assert least_forced(workload, 1000, 4).prompts == 1
    assert least_forced(workload, 1000, 4, 2).prompts == 3


def test_deferred_experts_are_read_in_calls_of_their_own():
    """One chosen expert at once and one a layer later touch more than both together."""
    machine, model = small_machine(**FAST | {"dram": 1e6}), tiny_model(num_local_experts=32)

    def seconds(**options: int) -> float:
        layer = gpu(qkv, attention, out_proj, route) >> offload >> cpu(experts, **options) >> load >> gpu(combine)
        scenario = tiny_scenario([1] * 32, [9] * 32, pipeline=layer, model=model, machine=machine)
        workload = scenario.workload
        cost = prepare(scenario, KTransformers()).cost
        forced = least_forced(workload, scenario.kv_blocks, 4)
        loads = Loads(cost, scenario.graph, scenario.machine, forced)
        return loads.limits(total_rows(workload, model))["cpu compute"]

    share = seconds(defer=1) / seconds()
    each, both = (1 - (1 - chosen / 32) ** 32 for chosen in (1, 2))
    in_one = 8 / 9 * 2 * each / both  # 8 of 9 output tokens are decodes; the last of four layers defers nothing
    assert share == pytest.approx(1 + 3 / 4 * (in_one - 1), rel=0.01)


def test_outputs_are_counted_by_the_blocks_that_their_sequences_hold():
    workload = Workload.lengths([4, 1], [4, 9])
    forced = least_forced(workload, blocks=100, block=4)
    held = [-(-(p + j) // 4) for p, g in ((4, 4), (1, 9)) for j in range(g)]
    last = forced.crowds[-1]
    assert (last.most, last.outputs, last.decodes, forced.decodes) == (2, len(held), len(held) - 2, len(held) - 2)
    assert forced.crowds[0].outputs == pytest.approx(max(sum(held) / 100, len(held) / 2))


def test_no_call_counts_for_more_than_its_rows():
    """However a call fills 6 blocks with at most 5 sequences, it counts for no more than min(rows, m) in each crowd."""
    for rows in range(1, 6):
        for held in combinations_with_replacement(range(1, 5), rows):
            if sum(held) <= 6:
                tokens = np.bincount(held, minlength=5)
                for crowd in crowds(5, tokens, tokens, 6):
                    assert crowd.outputs <= min(rows, crowd.most) + 1e-12


def test_less_kv_memory_never_raises_the_bound():
    throughput = [bound(tiny_scenario([8] * 20, [9] * 20, blocks=n), VSLPipe()).gen_tok_s for n in (4, 8, 16, 1000)]
    assert throughput == sorted(throughput)
    assert throughput[0] < throughput[-1]


def test_the_bound_is_the_same_for_every_schedule():
    scenario = tiny_scenario([8] * 5, [4] * 5)
    assert bound(scenario, Sequential()).limits == bound(scenario, VSLPipe()).limits


def test_the_bound_checks_what_a_run_would():
    with pytest.raises(ScheduleError):
        bound(tiny_scenario(pipeline=PIPELINES["all_cpu"]), VSLPipe())
    with pytest.raises(CapacityError):
        bound(tiny_scenario(machine=small_machine(gpu_memory=1e5)), VSLPipe())


def test_prefills_of_one_token_are_not_charged_as_decodes():
    """An iteration may have one prefill token and no decode, which reads no cache."""
    machine = small_machine(**FAST | {"hbm": 1e6})
    scenario = tiny_scenario([1] * 3, [1] * 3, blocks=1, block=1, pipeline=PIPELINES["all_gpu"], machine=machine)
    assert bound(scenario, Sequential()).seconds <= simulate(scenario, Sequential()).seconds * (1 + 1e-9)


def test_deeper_models_take_proportionally_longer():
    shallow, deep = (bound(tiny_scenario([8] * 5, [4] * 5, model=tiny_model(n)), VSLPipe()) for n in (3, 6))
    assert deep.limits["cpu compute"] == pytest.approx(2 * shallow.limits["cpu compute"])


def test_requests_that_come_late_are_waited_for():
    scenario = tiny_scenario([8] * 3, [4] * 3)
    late = scenario.on(workload=scenario.workload.arriving(at=[0.0, 1.0, 1e6]))
    least, played = bound(late, VSLPipe()), simulate(late, VSLPipe())
    assert least.seconds == 1e6 <= played.seconds
    assert least.binding == "the last arrival"
    (sentence,) = compare([least, played]).explanations()
    assert sentence.startswith("The arrival of the requests limits VSLPipe (simulated ")
    soon = scenario.on(workload=scenario.workload.arriving(at=[0.0, 0.0, 0.0]))
    assert bound(soon, VSLPipe()).seconds == bound(scenario, VSLPipe()).seconds


LINES = st.lists(st.tuples(st.floats(0, 5), st.floats(-4, 4)), min_size=1, max_size=4)
"""Value at 0 and slope of lines over the share of recomputation."""


def limits_of(lines, most, evaluated):
    def limits(again):
        evaluated.append(again)
        return {str(number): value + slope * again / most for number, (value, slope) in enumerate(lines)}

    return limits


@examples(300)
@given(LINES, st.sampled_from([1.0, 1e3, 7e8]))
def test_the_least_of_convex_limits_is_found_in_few_tries(lines, most):
    tried = []
    limits = limits_of(lines, most, tried)
    found = _least(limits, limits(0.0), most)
    corners = [0.0, 1.0] + [
        share
        for (one, up), (other, down) in combinations(lines, 2)
        if up != down and 0 <= (share := (other - one) / (up - down)) <= 1
    ]
    least = min(max(value + slope * share for value, slope in lines) for share in corners)
    assert least - 1e-9 <= found <= least + 5e-6
    assert 0 <= min(tried) <= max(tried) <= most
    assert len(tried) < 48


@pytest.mark.parametrize(
    ("value", "least"),
    [
        (lambda share: 2 - share, 1.0),  # at the last amount that is tried
        (lambda share: max(1.0, 2 - 10 * share, 10 * share - 5), 1.0),  # a plateau
        (lambda share: 1 + abs(share - 5e-7), 1 + 5e-7),  # within a step of nothing
        (lambda share: min(1 + 1e6 * share, 1.1) - 0.5 * min(share, 0.3), 0.95),  # it rises first and falls later
        (lambda share: 1.0, 1.0),
        (lambda share: abs(share - 0.4) ** 0.5, 0.0),  # steep, and no line
    ],
)
def test_the_least_is_found_where_the_largest_limit_has_odd_shapes(value, least):
    most = 1e6

    def limits(again):
        return {"one": value(again / most), "other": 0.0}

    assert _least(limits, limits(0.0), most) == pytest.approx(least, abs=1e-3 if least == 0 else 2e-6)


def test_the_least_is_found_where_curved_limits_meet():
    def limits(share):
        return {"falling": (1 - share) ** 2, "rising": 3 * share**2, "always": 0.1}

    meeting = 1 / (1 + 3**0.5)
    assert _least(limits, limits(0.0), 1.0) == pytest.approx(3 * meeting**2, abs=3e-6)


def test_all_tangents_of_a_parabola_are_among_the_highest_lines():
    touching = np.arange(60.0)
    prices, counts = 2 * (60 - touching), touching + (60 - touching) / 2
    assert set(_highest(prices, counts, 59.0)) == set(zip(prices, counts, strict=True))


@examples(300)
@given(st.lists(st.tuples(st.floats(1e-3, 9), st.floats(-50, 100)), min_size=1, max_size=40), st.floats(0, 60))
def test_the_highest_lines_are_as_high_as_all(lines, most):
    prices, counts = map(np.array, zip(*lines, strict=True))
    few = _highest(prices, counts, most)
    assert set(few) <= set(lines)
    for x in np.linspace(0, most, 50):
        highest = float((prices * (counts - x)).max())
        assert max(price * (count - x) for price, count in few) == pytest.approx(highest, rel=1e-9, abs=1e-9)


@examples(40)
@given(scenarios())
def test_a_search_of_all_amounts_of_recomputation_gives_no_less(case):
    scenario, schedule = case
    prepared = prepare(scenario, schedule)
    workload = scenario.workload.as_served
    running = most_running(scenario.scheduler)
    forced = least_forced(workload, scenario.kv_blocks, scenario.memory.kv_block, running)
    loads = Loads(prepared.cost, prepared.lowering.stack, scenario.machine, forced)
    most = float(((workload.output_len - 1) * (2 * workload.prompt_len + workload.output_len)).sum()) / 2

    def slowest(tokens):
        def left(model):
            return recomputed(total_rows(workload, model), model, tokens, forced.shortest)

        return max(loads.limits(prepared.cost.by_kind(left)).values())

    low, high = 0.0, most
    while high - low > 1e-12 * most:
        third = (high - low) / 3
        low, high = (low, high - third) if slowest(low + third) < slowest(high - third) else (low + third, high)
    found = {name: value for name, value in bound(scenario, schedule).limits.items() if name != ARRIVAL}
    least = min(map(slowest, (0.0, low, most)))  # a transfer without bytes, at either end, saves its overhead too
    assert least * (1 - 1e-12) <= max(found.values()) <= least * (1 + 1e-5)  # its own search ends within 1e-6 of `most`


@pytest.mark.parametrize(
    ("prompt", "output", "block"), [((3, 8, 1), (4, 1, 7), 4), ((5, 5), (1, 1), 1), ((7,), (9,), 2)]
)
def test_tokens_are_counted_by_the_blocks_held_as_one_by_one(prompt, output, block):
    workload = Workload.lengths(prompt, output)
    counted = Counter(-(-(p + made) // block) for p, g in zip(prompt, output, strict=True) for made in range(g))
    blocks = 1000
    forced = least_forced(workload, blocks, block)
    together = len(prompt)
    for crowd in forced.crowds:
        one_by_one = sum(count * min(1.0, crowd.most * held / blocks) for held, count in counted.items())
        assert crowd.outputs == pytest.approx(max(one_by_one, crowd.most / together * sum(output)), rel=1e-12)
    assert forced.crowds[-1].most == together
