"""Static and continuous batching, chunked and layered prefill, rule by rule."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.builders import open_queue, schedulers, tiny_scenario
from tests.systems import PIPELINES, VSL
from workbench.core.errors import CapacityError, ScenarioError
from workbench.perfmodels.layered_prefill import layer_groups
from workbench.pipeline import fetch, gpu
from workbench.scenario import Scenario
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.static import StaticBatching
from workbench.scheduler.token_balance import balance
from workbench.schedules import Sequential, Step, VSLPipe
from workbench.serving import prepare
from workbench.serving.prepared import facts
from workbench.simulate import simulate
from workbench.stages import attention, kv, moe, out_proj, qkv


def played(scheduler, prompt, output, *, blocks=1000, block=4, budget=1000.0, layers=4):
    """Every iteration: the prefill rectangles, and who decodes at which context; and the queue."""
    queue, memory = open_queue(
        prompt, output, blocks=blocks, block=block, budget=budget, scheduler=scheduler, layers=layers
    )
    seen = []
    while (batch := queue.next()) is not None:
        rectangles = list(batch)[: len(batch.prefills)]
        seen.append((rectangles, dict(zip(batch.decodes.tolist(), batch.context.tolist(), strict=True))))
        queue.complete(batch)
    memory.check()
    assert memory.used == 0
    return seen, queue


def who(iterations):
    """Who prefills and who decodes in every iteration."""
    return [([rectangle.request for rectangle in prefills], list(decodes)) for prefills, decodes in iterations]


# ------------------------------------------------------------------------------------------------------------- static


def test_a_static_batch_is_served_to_its_end_before_the_next_begins():
    iterations, _ = played(StaticBatching(micro_batches=1, size=2), [5, 4, 3], [3, 2, 2])
    assert who(iterations) == [([0, 1], []), ([], [0, 1]), ([], [0]), ([2], []), ([], [2])]


def test_a_static_batch_takes_the_longest_first_into_the_emptiest_micro_batch():
    queue, _ = open_queue([3, 9, 4, 5], [2] * 4, blocks=1000, block=4, scheduler=StaticBatching(2, 2))
    batch = queue.next()
    dealt = balance([3, 9, 4, 5], micro_batches=2, size=2, output_len=2, cache=2000).micro_batches
    assert dealt == [[3, 2], [1, 0]]
    assert [batch.prefills[batch.hint.part == part].tolist() for part in range(2)] == dealt
    queue.complete(batch)
    assert queue.next().hint.part.tolist() == batch.hint.part.tolist()


def test_a_static_batch_fills_the_cache_if_no_size_is_given():
    iterations, queue = played(StaticBatching(), [4] * 6, [4] * 6, blocks=6)  # 24 tokens, 8 each
    assert [len(prefills) for prefills, _ in who(iterations) if prefills] == [3, 3]
    assert queue.preemptions == 0


def test_the_prefill_of_a_static_batch_keeps_within_the_budget():
    iterations, _ = played(StaticBatching(), [4] * 4, [2] * 4, budget=8)
    assert who(iterations) == [([0, 1], []), ([2, 3], []), ([], [0, 1, 2, 3])]


def test_a_schedule_with_as_many_parts_takes_the_micro_batches_of_the_scheduler():
    scenario = tiny_scenario([3, 9, 4, 5], [2] * 4, scheduler=StaticBatching(2, 2))
    prepared = prepare(scenario, VSLPipe())
    queue, _ = open_queue([3, 9, 4, 5], [2] * 4, blocks=1000, block=4, scheduler=scenario.scheduler, layers=4)
    parts = prepared.lowering.plan(queue.next(), Step.FIRST).parts
    assert [sorted(part.prefills.tolist()) for part in parts] == [[2, 3], [0, 1]]


# --------------------------------------------------------------------------------------------------------- continuous


def test_continuous_batching_prefills_first_and_decodes_between():
    iterations, _ = played(ContinuousBatching(), [4, 4, 4], [3, 3, 3], budget=8)
    assert who(iterations) == [([0, 1], []), ([2], []), ([], [0, 1, 2]), ([], [0, 1, 2])]


def test_who_is_preempted_is_prefilled_anew_when_its_blocks_are_free():
    iterations, queue = played(ContinuousBatching(), [4, 4], [2, 2], blocks=2)
    assert who(iterations) == [([0, 1], []), ([], [0]), ([1], [])]
    assert (queue.preemptions, queue.recomputed) == (1, 4)


def test_no_more_sequences_run_than_the_budget_has_tokens():
    iterations, _ = played(ContinuousBatching(), [1] * 9, [5] * 9, budget=3)
    assert max(len(decodes) for _, decodes in who(iterations)) == 3


def test_prompts_join_running_sequences_only_as_far_as_the_budget_goes():
    iterations, _ = played(ContinuousBatching(), [1] * 9, [1, 5, 5] * 3, budget=3)
    assert max(len(decodes) for _, decodes in who(iterations)) == 3


def test_the_shortest_prompt_that_may_come_in_pieces():
    chunked = ChunkedPrefill()
    assert [chunked.splits(longest, 4) for longest in (1, 2)] == [False, True]
    layered = LayeredPrefill(granularity=8)
    assert [layered.splits(longest, 4) for longest in (32, 33)] == [False, True]


# ------------------------------------------------------------------------------------------------------------ chunked


def test_a_long_prompt_comes_in_chunks_beside_the_decodes():
    iterations, _ = played(ChunkedPrefill(6), [2, 11], [9, 2], budget=6)
    assert [[(r.request, r.start, r.stop, r.emits) for r in prefills] for prefills, _ in iterations[:3]] == [
        [(0, 0, 2, True), (1, 0, 4, False)],
        [(1, 4, 9, False)],  # one decode takes one of the six
        [(1, 9, 11, True)],
    ]
    assert [sorted(decodes) for _, decodes in iterations[:4]] == [[], [0], [0], [0, 1]]


def test_no_chunked_iteration_exceeds_its_budget_and_none_starves_the_decodes():
    iterations, _ = played(ChunkedPrefill(7), [13, 1, 20, 5, 9], [6, 9, 3, 4, 5], budget=7)
    sizes = [sum(r.stop - r.start for r in prefills) + len(decodes) for prefills, decodes in iterations]
    assert max(sizes) == 7
    begun = [request for prefills, _ in iterations for request in (r.request for r in prefills if r.start == 0)]
    assert begun == [0, 1, 2, 3, 4]


def test_blocks_of_a_whole_prompt_are_reserved_with_its_first_chunk():
    queue, blocks = open_queue([10], [1], blocks=3, block=4, budget=4, scheduler=ChunkedPrefill(4), layers=2)
    queue.next()
    assert blocks.used == 3


def test_a_chunked_prefill_in_flight_is_the_first_to_be_preempted():
    iterations, queue = played(ChunkedPrefill(5), [4, 8], [9, 1], blocks=3, budget=5)
    assert queue.preemptions == 1
    assert queue.recomputed == 1  # one token had passed all layers when its blocks went to the decode
    starts = [r.start for prefills, _ in iterations for r in prefills if r.request == 1]
    assert starts.count(0) == 2


# ------------------------------------------------------------------------------------------------------------ layered


@pytest.mark.parametrize(("prompt", "groups"), [(1, 1), (8, 1), (9, 2), (17, 3), (32, 4)])
def test_a_prompt_passes_one_group_of_layers_per_iteration(prompt, groups):
    iterations, _ = played(LayeredPrefill(8), [prompt], [2])
    passed = [prefills[0].layers for prefills, _ in iterations if prefills]
    assert len(passed) == groups == layer_groups(prompt, 4, granularity=8)
    assert [layer for layers in passed for layer in layers] == [0, 1, 2, 3]
    assert [prefills[0].emits for prefills, _ in iterations if prefills] == [False] * (groups - 1) + [True]
    assert all((r.start, r.stop) == (0, prompt) for prefills, _ in iterations for r in prefills)


def test_decodes_go_on_beside_every_group():
    iterations, _ = played(LayeredPrefill(8), [2, 30], [9, 1])
    assert [sorted(decodes) for _, decodes in iterations[:5]] == [[], [0], [0], [0], [0]]


def test_short_prompts_are_merged_up_to_the_granularity():
    iterations, _ = played(LayeredPrefill(8), [3, 5, 1, 9, 2], [1] * 5)
    assert [prefills for prefills, _ in who(iterations)] == [[0, 1], [2], [3], [3], [4]]


def test_a_very_long_prompt_comes_in_pieces_of_granularity_times_layers():
    iterations, _ = played(LayeredPrefill(4), [40], [1])
    rectangles = [prefills[0] for prefills, _ in iterations]
    assert [(r.start, r.stop) for r in rectangles] == [(0, 16)] * 4 + [(16, 32)] * 4 + [(32, 40)] * 2
    assert [list(r.layers) for r in rectangles] == [[0], [1], [2], [3]] * 2 + [[0, 1], [2, 3]]
    assert [r.emits for r in rectangles] == [False] * 9 + [True]


def test_a_preempted_layered_prefill_begins_again_at_the_first_group():
    iterations, queue = played(LayeredPrefill(2), [6, 8], [9, 1], blocks=4)
    assert queue.preemptions == 1
    assert queue.recomputed == 0  # no token had passed the last layer
    first = [r.layers.start for prefills, _ in iterations for r in prefills if r.request == 1]
    assert first.count(0) == 2
    assert first[-4:] == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------------- of all


@given(
    schedulers(),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(0, 12),
    st.sampled_from([1, 3, 8]),
)
def test_every_scheduler_serves_every_request_to_its_end(scheduler, lengths, more, block):
    prompt, output = (list(column) for column in zip(*lengths, strict=True))
    least = max(-(-(p + g - 1) // block) for p, g in lengths)
    budget = scheduler.token_budget or 50
    iterations, queue = played(scheduler, prompt, output, blocks=least + more, block=block, budget=budget)
    tokens = np.zeros(len(prompt), dtype=int)
    for prefills, decodes in iterations:
        tokens[[r.request for r in prefills if r.emits]] += 1
        tokens[list(decodes)] += 1
    assert tokens.tolist() == output
    if not queue.preemptions:
        computed = np.zeros((len(prompt), 4, max(p + g for p, g in lengths)), dtype=int)
        for prefills, decodes in iterations:
            for r in prefills:
                computed[r.request, r.layers, r.start : r.stop] += 1
            for request, position in decodes.items():
                computed[request, :, position] += 1
        for request, (p, g) in enumerate(lengths):
            assert (computed[request, :, : p + g - 1] == 1).all(), "every layer and token once"
            assert not computed[request, :, p + g - 1 :].any()


LIMITED = [
    wb.ResourceAware(max_running=2),
    StaticBatching(2, max_running=2),
    ContinuousBatching(max_running=2),
    ChunkedPrefill(8, max_running=2),
    LayeredPrefill(64, max_running=2),
]


@pytest.mark.parametrize("scheduler", LIMITED, ids=repr)
def test_the_next_request_begins_when_one_of_those_that_may_run_is_finished(scheduler):
    iterations, _ = played(scheduler, [2, 3, 4, 5], [3, 5, 2, 2])
    at_work = [set(prefills) | set(decodes) for prefills, decodes in who(iterations)]
    assert max(map(len, at_work)) == 2
    assert len(at_work) >= 6  # 12 tokens, two at a time
    free, _ = played(replace(scheduler, max_running=None), [2, 3, 4, 5], [3, 5, 2, 2])
    assert len(free) < len(iterations)
    assert played(replace(scheduler, max_running=4), [2, 3, 4, 5], [3, 5, 2, 2])[0] == free


def test_a_preempted_request_counts_again_once_it_runs_again():
    """Three blocks for two requests of two blocks each: the newer one waits, and nobody comes before it."""
    iterations, queue = played(wb.ResourceAware(max_running=2), [4, 4, 4], [5, 5, 1], blocks=3)
    assert queue.preemptions == 1
    begun = [request for prefills, _ in who(iterations) for request in prefills]
    assert begun == [0, 1, 1, 2]


def test_a_static_batch_under_a_limit_takes_the_longest_of_every_micro_batch():
    queue, _ = open_queue([3, 9, 4, 5], [2] * 4, blocks=1000, block=4, scheduler=StaticBatching(2, max_running=2))
    batch = queue.next()
    assert sorted(batch.prefills.tolist()) == [1, 3]
    assert sorted(batch.hint.part.tolist()) == [0, 1]


@pytest.mark.parametrize("most", [0, -1, 2.5, True, "4"])
@pytest.mark.parametrize("kind", [type(one) for one in LIMITED], ids=lambda kind: kind.__name__)
def test_a_limit_that_is_no_number_of_sequences_is_refused(kind, most):
    words = f"max_running must be a whole number of sequences from 1 on, or None, not {most!r}"
    with pytest.raises(CapacityError, match=re.escape(words)):
        kind(max_running=most)


@pytest.mark.parametrize("scheduler", LIMITED, ids=repr)
def test_a_limit_is_part_of_what_is_asked(scheduler):
    """It is told where it is given, and a scenario without it keeps its digest."""
    scenario = tiny_scenario([5, 9], [3, 3], pipeline=PIPELINES["all_gpu"], scheduler=scheduler)
    free = scenario.on(scheduler=replace(scheduler, max_running=None))
    assert scenario.diff(free) == {"scheduler.max_running": (2, None)}
    assert "max_running=2" in str(scenario.scheduler)
    assert "max_running" not in str(free.scheduler)
    first, second = (prepare(each, Sequential()) for each in (scenario, free))
    assert facts(scenario, first)["question"] != facts(free, second)["question"]


@pytest.mark.parametrize(
    "scheduler", [StaticBatching(2, 3), ContinuousBatching(9), ChunkedPrefill(7), LayeredPrefill(5), *LIMITED], ids=repr
)
def test_a_scenario_with_any_scheduler_is_saved_and_loaded(scheduler, tmp_path):
    scenario = tiny_scenario([5, 9], [3, 3], pipeline=PIPELINES["all_gpu"], scheduler=scheduler)
    scenario = scenario.on(workload=scenario.workload.arriving(rate=2.0, seed=1))
    again = Scenario.load(scenario.save(tmp_path / "s.json"))
    assert again.scheduler == scheduler
    assert again.workload.arrival.tolist() == scenario.workload.arrival.tolist()
    assert simulate(again, Sequential()).steps == simulate(scenario, Sequential()).steps


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StaticBatching(0), "micro_batches must be a whole number from 1 on, not 0"),
        (lambda: StaticBatching(1, size=2.5), r"size must be a whole number from 1 on, not 2\.5"),
        (lambda: StaticBatching(token_budget=0), "token_budget must be at least 1 token"),
        (lambda: ContinuousBatching(-1), "token_budget must be at least 1 token"),
        (lambda: ChunkedPrefill(0), "token_budget must be at least 1 token"),
        (lambda: LayeredPrefill(True), "granularity must be a whole number of tokens from 1 on, not True"),
    ],
)
def test_a_scheduler_says_what_it_expects(make, words):
    with pytest.raises(CapacityError, match=words):
        make()


# ------------------------------------------------------------------------------------ where the KV of a piece is found


@pytest.mark.parametrize(
    ("scheduler", "pipeline", "refused"),
    [
        (ChunkedPrefill(8), VSL, True),
        (LayeredPrefill(8), VSL, False),  # 8 x 4 tokens and no prompt is longer
        (LayeredPrefill(2), VSL, True),
        (ContinuousBatching(), VSL, False),
        (ChunkedPrefill(8), fetch(kv) | gpu(qkv, attention, out_proj, moe), False),
        *((ChunkedPrefill(8), PIPELINES[name], False) for name in ("all_gpu", "all_cpu", "flexgen_s4")),
    ],
    ids=str,
)
def test_pieces_of_prompts_need_the_cache_where_their_attention_is(scheduler, pipeline, refused):
    scenario = tiny_scenario([20], [2], pipeline=pipeline, scheduler=scheduler)
    if refused:
        with pytest.raises(ScenarioError, match=r"gpu\(prefill_attention\) reads the KV .* on the cpu.*fetch\(kv\)"):
            simulate(scenario, VSLPipe())
    else:
        assert simulate(scenario, Sequential()).generated == 2


# ---------------------------------------------------------------------------------------------------------- cancelled


def played_without(scheduler, gone, after, blocks):
    """Who was in the batches, and whether the last one was known to be; `gone` is cancelled after so many iterations.

    None if it is finished by then.
    """
    queue, memory = open_queue(
        [2, 9, 14, 3, 5, 11], [9] * 6, blocks=blocks, block=3, budget=8, scheduler=scheduler, layers=3
    )
    seen, finished, last = [], set(), False
    while True:
        if len(seen) == after:
            if gone in finished:
                return None
            queue.cancel(np.array([gone]))
            assert memory.held[gone] == 0
        batch = queue.next()
        if batch is None:
            return (seen, finished, last) if len(seen) > after else None
        last = queue.ends_with(batch)
        seen.append(set(batch.requests.tolist()))
        finished |= set(queue.complete(batch).tolist())
        memory.check()


@pytest.mark.parametrize(
    "scheduler",
    [
        wb.ResourceAware(),
        StaticBatching(2),
        StaticBatching(1, 3),
        ContinuousBatching(),
        ChunkedPrefill(8),
        LayeredPrefill(4),
    ],
    ids=repr,
)
@pytest.mark.parametrize("blocks", [9, 30])
def test_a_cancelled_request_is_forgotten_wherever_it_is(blocks, scheduler):
    """After every iteration and of every request: it runs, is in flight, waits, was preempted or was put off.

    In the smaller cache requests are preempted, also while they are in flight.
    """
    tried = 0
    for gone, after in itertools.product(range(6), range(60)):
        found = played_without(scheduler, gone, after, blocks)
        if found is not None:
            seen, finished, last = found
            assert not any(gone in batch for batch in seen[after:])
            assert finished == set(range(6)) - {gone}
            assert last
            tried += 1
    assert tried > 60
