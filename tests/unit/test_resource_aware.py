"""MoE-Lens' scheduler, rule by rule (section 6.2 of the paper and the project's reading of it)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import open_queue, small_machine, tiny_scenario
from tests.systems import ids
from workbench.core.errors import CapacityError, ScenarioError
from workbench.scheduler.resource_aware import Admission, ResourceAware, steady_pace
from workbench.schedules import Sequential
from workbench.serving.prepared import price
from workbench.simulate import simulate
from workbench.workload import Workload


def served(queue):
    """Every iteration of a queue: (prefills with lengths, decodes with contexts)."""
    seen = []
    while (batch := queue.next()) is not None:
        prefills = dict(zip(batch.prefills.tolist(), batch.prefill_len.tolist(), strict=True))
        seen.append((prefills, dict(zip(batch.decodes.tolist(), batch.context.tolist(), strict=True))))
        queue.complete(batch)
    return seen


@pytest.mark.parametrize(
    ("prompt", "output", "blocks", "block", "budget", "expected"),
    [
        pytest.param([4] * 4, [4] * 4, 8, 2, 100, (7, 2, 36, 8), id="lens.ras.toy1"),
        pytest.param([4] * 4, [4] * 4, 8, 2, 5, (9, 0, 28, 0), id="lens.ras.toy2"),
        pytest.param([10] * 20, [8] * 20, 20, 4, 64, (33, 8, 437, 97), id="lens.ras.toy4"),
    ],
)
def test_reference_simulator_is_reproduced(prompt, output, blocks, block, budget, expected):
    """Rows lens.ras.toy* of the project's table of reference cases (own reference simulator)."""
    scenario = tiny_scenario(prompt, output, blocks=blocks, block=block, token_budget=budget)
    result = simulate(scenario, Sequential())
    assert (result.iterations, result.preemptions, result.processed, result.recomputed) == expected


def test_a_prefill_emits_the_first_token_and_each_decode_one_more():
    queue, _ = open_queue([3], [3], blocks=10, block=4)
    assert served(queue) == [({0: 3}, {}), ({}, {0: 3}), ({}, {0: 4})]


def test_the_last_token_is_not_written_to_the_cache():
    queue, blocks = open_queue([4], [1], blocks=1, block=4)
    batch = queue.next()
    assert blocks.used == 1
    assert queue.complete(batch).tolist() == [0]
    assert blocks.used == 0


def test_a_decode_takes_a_block_only_when_its_last_one_is_full():
    queue, blocks = open_queue([3], [4], blocks=10, block=4)
    used = []
    while (batch := queue.next()) is not None:
        used.append(blocks.used)
        queue.complete(batch)
    assert used == [1, 1, 2, 2]


def test_prompts_are_admitted_in_order_while_they_fit_the_budget():
    queue, _ = open_queue([6, 3, 3, 1], [2, 2, 2, 2], blocks=50, block=4, budget=10)
    assert list(served(queue)[0][0]) == [0, 1]


def test_a_prompt_that_does_not_fit_is_not_overtaken():
    queue, _ = open_queue([6, 5, 1], [9, 9, 9], blocks=50, block=4, budget=10)
    assert list(served(queue)[0][0]) == [0]


def test_decodes_come_out_of_the_budget_first():
    queue, _ = open_queue([5, 5, 5, 5], [9, 9, 9, 9], blocks=50, block=4, budget=10)
    iterations = served(queue)
    assert list(iterations[0][0]) == [0, 1]
    assert list(iterations[1][0]) == [2]  # 10 - 2 decodes leaves 8
    assert list(iterations[2][0]) == [3]  # 10 - 3 leaves 7


def test_a_prompt_is_admitted_only_if_its_blocks_are_free():
    queue, _ = open_queue([4, 5, 4], [1, 1, 1], blocks=3, block=4)
    assert [list(prefills) for prefills, _ in served(queue)] == [[0, 1], [2]]


def test_a_prompt_above_the_budget_runs_alone_when_nothing_else_does():
    queue, _ = open_queue([30, 2], [1, 1], blocks=50, block=4, budget=10)
    assert [list(prefills) for prefills, _ in served(queue)] == [[0], [1]]


def test_a_prompt_above_the_budget_waits_while_others_run():
    queue, _ = open_queue([2, 30], [3, 1], blocks=50, block=4, budget=10)
    assert [list(prefills) for prefills, _ in served(queue)] == [[0], [], [], [1]]


def test_the_newest_are_preempted_and_lose_all_their_blocks():
    queue, blocks = open_queue([4, 4, 4], [4, 4, 4], blocks=4, block=4)
    first = queue.next()
    assert first.prefills.tolist() == [0, 1, 2]
    queue.complete(first)
    second = queue.next()  # three need a block, one is free: 2 goes (1 block back, one need less), 2 are free for 2
    assert second.decodes.tolist() == [0, 1]
    assert blocks.held.tolist() == [2, 2, 0]
    assert queue.preemptions == 1


def test_preemption_stops_as_soon_as_the_rest_fits():
    queue, blocks = open_queue([4, 4, 4, 4], [4] * 4, blocks=6, block=4)
    queue.complete(queue.next())
    assert queue.next().decodes.tolist() == [0, 1, 2]
    assert blocks.free == 0


def test_a_victim_that_needs_no_block_gives_only_its_own_back():
    queue, blocks = open_queue([4, 4, 3], [4, 4, 4], blocks=3, block=4)
    queue.complete(queue.next())
    batch = queue.next()  # 0 and 1 need a block, none is free: 2 (needs none) gives 1, then 1 gives its own
    assert batch.decodes.tolist() == [0]
    assert queue.preemptions == 2
    assert blocks.free == 1


def test_nothing_is_admitted_in_an_iteration_that_preempts():
    queue, _blocks = open_queue([4, 4, 4, 1], [4, 4, 4, 1], blocks=4, block=4, budget=12)
    queue.complete(queue.next())
    batch = queue.next()
    assert queue.preemptions == 1
    assert len(batch.prefills) == 0


def test_room_left_after_a_preemption_is_not_used_before_the_next_iteration():
    queue, blocks = open_queue([4, 4, 3, 1], [9, 9, 9, 1], blocks=3, block=4, budget=11)
    queue.complete(queue.next())
    batch = queue.next()
    assert len(batch.prefills) == 0
    assert blocks.free == 1


def test_victims_return_in_the_order_in_which_they_were_admitted():
    queue, _ = open_queue([4, 4, 3], [3, 3, 3], blocks=3, block=4)
    iterations = served(queue)
    returning = [request for prefills, _ in iterations[1:] for request in prefills]
    assert returning[:2] == [1, 2]


def test_a_later_victim_is_older_and_returns_before_an_earlier_one():
    queue, _ = open_queue([2, 2, 2], [9, 9, 9], blocks=11, block=1)
    running = []
    while (batch := queue.next()) is not None:
        running.append((batch.prefills.tolist(), batch.decodes.tolist()))
        queue.complete(batch)
    assert running[1:5] == [([], [0, 1, 2]), ([], [0, 1]), ([], [0, 1]), ([], [0])]  # 2 leaves first, then 1
    assert [prefills[0] for prefills, _ in running[1:] if prefills][:2] == [1, 2]


def test_victims_go_before_every_new_request():
    queue, _ = open_queue([4, 4, 4, 2], [6, 6, 6, 2], blocks=4, block=4, budget=12)
    order = [request for prefills, _ in served(queue) for request in prefills]
    assert order[:3] == [0, 1, 2]
    assert order.index(3) > order.index(2, 3)


def test_new_requests_follow_in_the_iteration_that_empties_the_line_of_victims():
    queue, _ = open_queue([4, 4, 1], [3, 3, 1], blocks=3, block=4, budget=8)
    iterations = served(queue)
    assert queue.preemptions == 1
    assert [sorted(prefills) for prefills, _ in iterations if len(prefills) > 1] == [[0, 1], [1, 2]]


def test_a_victim_prefills_its_prompt_and_what_it_had_generated():
    queue, _ = open_queue([3, 3], [6, 6], blocks=3, block=4)
    iterations = served(queue)
    returned = [(request, length) for prefills, _ in iterations[1:] for request, length in prefills.items()]
    assert returned == [(1, 5)]  # prompt 3, emitted in the prefill and one decode
    assert (queue.preemptions, queue.recomputed) == (1, 4)


def test_a_victim_goes_on_where_it_stopped():
    queue, _ = open_queue([3, 3], [6, 6], blocks=3, block=4)
    tokens = [0, 0]
    for prefills, decodes in served(queue):
        for request in (*prefills, *decodes):
            tokens[request] += 1
    assert tokens == [6, 6]


def test_running_requests_keep_the_order_of_their_admission():
    queue, _ = open_queue([2, 2, 2], [2, 4, 4], blocks=50, block=4, budget=4)
    assert [list(decodes) for _, decodes in served(queue)][:4] == [[], [0, 1], [1, 2], [1, 2]]


def test_the_end_is_announced_with_the_last_batch_and_not_before():
    queue, _ = open_queue([3, 3, 3], [3, 1, 2], blocks=50, block=4, budget=6)
    last = []
    while (batch := queue.next()) is not None:
        last.append(queue.ends_with(batch))
        queue.complete(batch)
    assert last == [False] * (len(last) - 1) + [True]


def test_closing_gives_back_every_block():
    queue, blocks = open_queue([5, 5], [4, 4], blocks=10, block=4)
    queue.next()
    assert blocks.used == 4
    queue.close()
    assert blocks.used == 0
    blocks.check()


def test_a_budget_of_ones_own_replaces_the_machines():
    scenario = tiny_scenario([4] * 6, [1] * 6, token_budget=8)
    assert simulate(scenario, Sequential()).steps.prefill == (8, 8, 8)


def test_a_budget_below_one_token_is_refused():
    with pytest.raises(CapacityError, match="token_budget must be at least 1 token per iteration, not 0"):
        ResourceAware(token_budget=0)


def test_contexts_are_those_of_the_cache_before_the_new_token():
    queue, _ = open_queue([3, 2], [3, 3], blocks=50, block=4)
    queue.complete(queue.next())
    batch = queue.next()
    assert batch.context.tolist() == [3, 2]
    assert batch.requests.tolist() == ids(0, 1).tolist()


# ----------------------------------------------------------------------------------------------------- paced admission


def paced(prompt, output, **sizes):
    """What every iteration prefills under paced admission, and the queue."""
    queue, _ = open_queue(prompt, output, admission=Admission.PACED, **sizes)
    return [list(prefills) for prefills, _ in served(queue)], queue


def test_the_pace_is_what_the_cache_carries_over_the_lives_of_its_requests():
    """SPEC 1.5 and 1.6: q = N / S, the sum to g - 1; here 1 + 1 + 2 and 2 blocks, 3 in the mean."""
    assert steady_pace(Workload.lengths([3, 8], [3, 1]), blocks=12, block=4) == 4
    assert steady_pace(Workload.lengths(98, 32, 5), blocks=33378, block=16) == pytest.approx(
        33378 / sum(-(-(98 + i) // 16) for i in range(32))
    )


def test_paced_admission_brings_in_q_requests_per_iteration():
    iterations, _ = paced([4] * 8, [2] * 8, blocks=6, block=4)  # 1 + 2 blocks each: q = 2
    assert iterations[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    iterations, _ = paced([4] * 6, [2] * 6, blocks=12, block=4)  # q = 4
    assert iterations[:2] == [[0, 1, 2, 3], [4, 5]]


def test_fractions_of_a_request_add_up():
    iterations, _ = paced([1] * 7, [2] * 7, blocks=3, block=4)  # 1 + 1 block each: q = 3/2
    assert [len(new) for new in iterations] == [1, 2, 1, 2, 1, 0]


def test_less_than_one_request_per_iteration_still_goes_on():
    iterations, queue = paced([4] * 3, [4] * 3, blocks=4, block=4)  # 1 + 2 + 2 + 2 blocks: q = 4/7
    assert [place for place, new in enumerate(iterations) if new] == [0, 3, 5]
    assert queue.preemptions == 0


def test_what_was_held_back_is_not_made_up_for_in_a_burst():
    """The first request takes all blocks for five iterations; then four per iteration come in, and not eleven."""
    iterations, _ = paced([40] + [4] * 30, [5] + [1] * 30, blocks=11, block=4)  # q = 11 / ((54 + 30) / 31) = 4.06
    assert [len(new) for new in iterations[:8]] == [2, 0, 0, 0, 0, 4, 4, 4]


def test_where_greedy_admission_preempts_paced_admission_of_equal_requests_need_not():
    greedy, _ = open_queue([4] * 40, [8] * 40, blocks=60, block=1)
    served(greedy)
    _, gentle = paced([4] * 40, [8] * 40, blocks=60, block=1)  # 4 + 5 + ... + 11 blocks: q = 1
    assert greedy.preemptions > 0
    assert gentle.preemptions == 0


def test_victims_return_whatever_the_pace():
    queue, _ = open_queue([4, 4, 3], [3, 3, 3], blocks=3, block=4, admission=Admission.PACED)
    assert sorted({request for prefills, _ in served(queue) for request in prefills}) == [0, 1, 2]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12), st.integers(0, 30))
def test_paced_admission_serves_every_request_to_its_end(lengths, more):
    prompt, output = zip(*lengths, strict=True)
    least = max(-(-(p + g - 1) // 4) for p, g in lengths)
    queue, blocks = open_queue(prompt, output, blocks=least + more, block=4, budget=50, admission=Admission.PACED)
    tokens = np.zeros(len(prompt), dtype=int)
    for prefills, decodes in served(queue):
        tokens[[*prefills, *decodes]] += 1
    assert tokens.tolist() == list(output)
    blocks.check()
    assert blocks.used == 0


def test_how_to_admit_is_no_text():
    with pytest.raises(ScenarioError, match=r"Admission\.GREEDY or Admission\.PACED, not 'paced'"):
        ResourceAware(admission="paced")
    assert repr(ResourceAware(admission=Admission.PACED)).endswith("admission=Admission.PACED)")


@pytest.mark.parametrize("budget", [0, -1, float("nan"), "64", True])
def test_a_budget_that_is_no_number_of_tokens_is_refused(budget):
    with pytest.raises(CapacityError, match="token_budget must be at least 1 token per iteration"):
        ResourceAware(token_budget=budget)


def test_short_prompts_fill_the_budget_though_a_long_one_waits_behind_them():
    queue, _ = open_queue([10] * 5 + [50], [2] * 6, blocks=1000, block=4, budget=50)
    assert queue.next().prefills.tolist() == [0, 1, 2, 3, 4]


def test_requests_decode_together_though_the_link_is_fast():
    """Where the GPU computes fewer tokens while weights stream than a prompt has, two prompts still fit the budget."""
    scenario = tiny_scenario([400] * 6, [5] * 6, machine=small_machine(h2d=1e12))
    prepared = price(scenario, Sequential())
    assert prepared.cost.token_budget < 400
    assert prepared.token_budget == 2 * 400
    assert simulate(scenario, Sequential()).iterations < 6 * 5
