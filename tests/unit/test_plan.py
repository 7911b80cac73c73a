"""How lanes run a plan: strict order, waiting, and packets that let small transfers pass."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.systems import MIXED, PIPELINES, VSL
from workbench.core.timeline import ITERATION
from workbench.pipeline.layer_graph import EMBED, HEAD, WEIGHTS, Node, NodeKind
from workbench.pipeline.stack_graph import stack_graph
from workbench.schedules import Sequential, Step, VSLPipe
from workbench.schedules.plan import (
    Page,
    Plan,
    Task,
    Turns,
    busy_seconds,
    lay_out,
    let_begin,
    one_at_a_time,
    part_name,
    play,
)

GPU, CPU = Node(NodeKind.SEGMENT, "A", "gpu"), Node(NodeKind.SEGMENT, "C", "cpu")
OUT, IN = Node(NodeKind.MOVE, "Q", "d2h"), Node(NodeKind.MOVE, "H", "h2d")


def task(node, *after):
    return Task(node, 0, 0, after)


def bulk(*after):
    return Task(WEIGHTS, 0, None, after, ((0, 0),), bulk=True)


def spans(tasks, seconds, packet=float("inf")):
    return list(zip(*lay_out(tasks, seconds, packet), strict=True))


def test_a_lane_runs_one_task_at_a_time_in_issue_order():
    assert spans([task(GPU), task(GPU), task(GPU)], [1.0, 2.0, 3.0]) == [(0, 1), (1, 3), (3, 6)]


def test_lanes_run_side_by_side():
    assert spans([task(GPU), task(CPU)], [2.0, 3.0]) == [(0, 2), (0, 3)]


def test_a_task_waits_for_the_last_of_what_it_needs():
    assert spans([task(GPU), task(CPU), task(OUT, 0, 1)], [2.0, 3.0, 1.0])[2] == (3, 4)


def test_a_first_task_that_is_not_ready_blocks_its_lane():
    tasks = [task(CPU), task(GPU, 0), task(GPU)]
    assert spans(tasks, [5.0, 1.0, 1.0]) == [(0, 5), (5, 6), (6, 7)]


def test_a_bulk_transfer_waits_for_the_small_ones_issued_before_it():
    assert spans([task(IN), bulk()], [2.0, 3.0], 1.0) == [(0, 2), (2, 5)]


def test_bulk_transfers_follow_one_another():
    assert spans([bulk(), bulk()], [2.0, 3.0], 1.0) == [(0, 2), (2, 5)]


def test_a_small_transfer_that_is_ready_first_goes_before_a_bulk_one():
    assert spans([task(CPU), bulk(0), task(IN)], [1.0, 4.0, 1.0], 1.0) == [(0, 1), (1, 5), (0, 1)]
    assert spans([bulk(), task(IN)], [4.0, 1.0], 1.0) == [(1, 5), (0, 1)]


def test_a_small_transfer_passes_at_the_next_packet_boundary_and_delays_the_rest():
    tasks = [bulk(), task(CPU), task(IN, 1)]
    assert spans(tasks, [6.0, 1.5, 0.5], 1.0) == [(0, 6.5), (0, 1.5), (2.0, 2.5)]


def test_without_packets_a_small_transfer_waits_for_the_whole_bulk_one():
    tasks = [bulk(), task(CPU), task(IN, 1)]
    assert spans(tasks, [6.0, 1.5, 0.5]) == [(0, 6), (0, 1.5), (6.0, 6.5)]


def test_a_small_transfer_after_the_bulk_one_does_not_delay_it():
    tasks = [bulk(), task(CPU), task(IN, 1)]
    assert spans(tasks, [2.0, 5.0, 1.0], 1.0) == [(0, 2), (0, 5), (5, 6)]


def test_an_empty_transfer_neither_waits_for_a_packet_nor_delays_one():
    tasks = [bulk(), task(CPU), task(IN, 1)]
    assert spans(tasks, [6.0, 1.5, 0.0], 1.0) == [(0, 6), (0, 1.5), (1.5, 1.5)]


def test_packets_start_again_after_a_small_transfer_passed():
    """Packets run 0-1, 1.5-2.5, 2.5-3.5: a transfer ready at 2 waits until 2.5, not within the second packet."""
    tasks = [bulk(), task(CPU), task(IN, 1), task(CPU), task(IN, 3)]
    assert spans(tasks, [4.0, 0.5, 0.5, 1.5, 0.5], 1.0)[4] == (2.5, 3.0)


def test_two_small_transfers_in_a_row_share_one_packet_boundary():
    """The second is ready while the first is on the link, so no packet comes between them."""
    tasks = [bulk(), task(CPU), task(IN, 1), task(CPU), task(IN, 3)]
    assert spans(tasks, [4.0, 0.5, 0.5, 0.5, 0.5], 1.0)[2:] == [(1.0, 1.5), (0.5, 1.0), (1.5, 2.0)]


def test_what_waits_for_a_delayed_bulk_transfer_waits_for_its_new_end():
    tasks = [bulk(), task(CPU), task(IN, 1), task(GPU, 0)]
    assert spans(tasks, [6.0, 1.5, 0.5, 1.0], 1.0)[3] == (6.5, 7.5)


def test_a_small_transfer_delays_the_bulk_one_under_way_and_those_that_wait_behind_it():
    tasks = [bulk(), bulk(), task(CPU), task(IN, 2), task(CPU), task(IN, 4)]
    assert spans(tasks, [3.0, 2.0, 1.5, 0.5, 2.5, 0.25], 1.0) == [
        (0, 3.5), (3.5, 5.75), (0, 1.5), (2.0, 2.5), (1.5, 4.0), (4.5, 4.75)
    ]  # fmt: skip


@pytest.mark.parametrize("waiting", [1, 5, 20])
def test_however_many_bulk_transfers_wait_a_small_one_passes_the_one_under_way_and_delays_all(waiting):
    tasks = [*(bulk() for _ in range(waiting)), task(CPU), task(IN, waiting)]
    found = spans(tasks, [3.0] * waiting + [0.5, 0.25], 1.0)
    assert found[-1] == (1.0, 1.25)
    assert found[:waiting] == [(0, 3.25), *((3 * n + 0.25, 3 * n + 3.25) for n in range(1, waiting))]


@pytest.mark.parametrize(("layers", "makespan"), [(2, 21.0), (3, 31.0)])
def test_vslpipe_takes_as_long_as_the_reference_simulator_says(layers, makespan):
    """The project's table of reference cases, rows sched.VSL.L2 and sched.VSL.L3: warm start, phase barrier."""
    seconds = {"A": 1.0, "C": 2.0, "B": 3.0, "Q": 1.0, "H": 1.0, "W": 6.0, "E": 0.0, "Z": 0.0}
    tasks = VSLPipe().tasks(stack_graph(VSL, layers), Step.LAST)
    _, ends = lay_out(tasks, [seconds[task.node.code] for task in tasks], packet=seconds["W"] / 6)
    assert max(ends) == pytest.approx(makespan, abs=1e-9)


def test_one_packet_for_everything_is_slower_than_six():
    seconds = {"A": 1.0, "C": 2.0, "B": 3.0, "Q": 1.0, "H": 1.0, "W": 9.0, "E": 0.0, "Z": 0.0}
    tasks = VSLPipe().tasks(stack_graph(VSL, 4), Step.LAST)
    lengths = [seconds[task.node.code] for task in tasks]
    assert max(lay_out(tasks, lengths)[1]) > max(lay_out(tasks, lengths, 1.5)[1])


def test_busy_time_is_the_sum_per_lane():
    assert busy_seconds([task(GPU), task(GPU), task(IN)], [1.0, 2.0, 4.0]) == {"gpu": 3, "cpu": 0, "d2h": 0, "h2d": 4}


def test_a_task_is_named_by_node_layer_and_part():
    assert task(GPU).name == "A0a"
    assert Task(WEIGHTS, 3, None).name == "W3"
    assert [part_name(part) for part in (0, 25, 26)] == ["a", "z", "p26"]


def test_a_task_outside_the_layers_is_placed_before_the_first_or_after_the_last():
    assert Task(GPU, 3, 0).place(4) == 3
    assert [Task(node, -1, 0).place(4) for node in (EMBED, OUT)] == [-1, -1]
    assert [Task(node, -1, 0).place(4) for node in (HEAD, IN)] == [4, 4]


def test_plans_are_equal_if_they_do_the_same_for_the_same_batch():
    plan = Sequential().lower(VSL, MIXED)
    assert plan == Sequential().lower(VSL, MIXED)
    assert plan != Sequential(micro_batches=2).lower(VSL, MIXED)
    assert plan != Sequential().lower(PIPELINES["all_gpu"], MIXED)
    with pytest.raises(TypeError):
        hash(plan)


def test_every_task_waits_only_for_earlier_ones():
    plan = VSLPipe().lower(VSL, MIXED)
    assert isinstance(plan, Plan)
    assert all(other < index for index, task in enumerate(plan.tasks) for other in task.after)


def test_a_plan_shows_its_chart_in_a_notebook():
    assert "lanes if every task took one unit" in Sequential().lower(VSL, MIXED)._repr_html_()


@pytest.mark.parametrize(
    ("stream", "expected"),
    [(4.0, 4.0), (1.0, 2.5), (0.0, 2.0), (3.0, 3.5)],
    ids=["all the way", "for a while", "not at all", "for most of it"],
)
def test_a_task_beside_a_stream_makes_less_progress(stream, expected):
    starts, ends = lay_out([bulk(), task(GPU)], [stream, 2.0], 1.0, [0.0, 0.5])
    assert (starts[1], ends[1]) == (0, expected)


def test_a_stream_that_ended_while_another_lane_was_busy_still_slows_down_the_lane_that_was_free():
    """The CPU is busy until 5, but the GPU begins at 0 beside the first stream, which ends at 2."""
    starts, ends = lay_out([bulk(), task(CPU), bulk(), task(GPU)], [2.0, 5.0, 3.0, 1.0], 1.0, [0.0, 0.0, 0.0, 0.5])
    assert list(zip(starts, ends, strict=True)) == [(0, 2), (0, 5), (2, 5), (0, 2)]


def test_only_the_lane_that_pays_is_slowed_down():
    _, ends = lay_out([bulk(), task(GPU), task(CPU)], [10.0, 2.0, 2.0], 1.0, [0.0, 0.5, 0.0])
    assert ends == [10.0, 4.0, 2.0]


def test_a_task_that_starts_in_the_middle_of_a_stream_is_slowed_for_the_rest_of_it():
    _, ends = lay_out([bulk(), task(CPU), task(GPU, 1)], [4.0, 3.0, 2.0], 1.0, [0.0, 0.0, 0.5])
    assert ends[2] == 3 + 1 + 1.5


def test_compute_tasks_that_wait_for_one_another_go_one_at_a_time():
    chain = [task(GPU), task(OUT, 0), task(CPU, 1), task(IN, 2), task(GPU, 3)]
    assert one_at_a_time(chain, [1.0] * 5)
    assert not one_at_a_time([task(GPU), task(CPU)], [1.0, 1.0])
    assert not one_at_a_time([*chain, task(CPU, 0)], [1.0] * 6)


def test_tasks_without_work_and_transfers_do_not_count_as_going_beside_others():
    assert one_at_a_time([task(GPU), task(CPU)], [1.0, 0.0])
    assert one_at_a_time([bulk(), task(GPU), task(OUT), task(CPU, 1)], [1.0] * 4)


@given(st.floats(0, 1e12), st.integers(1, 40))
def test_pages_follow_one_another_and_share_a_transfer_evenly(size, pages):
    cuts = [Page(number, pages).cut(size) for number in range(pages)]
    assert (cuts[0][0], cuts[-1][1]) == (0, size)
    assert all(before[1] == after[0] for before, after in pairwise(cuts))
    assert all(abs(end - begin - size / pages) <= 128 for begin, end in cuts)


def begun_by(tasks, seconds, packet=float("inf")):
    return let_begin(tasks, *lay_out(tasks, seconds, packet))


def test_what_let_a_task_begin_is_the_last_to_end_of_its_needs_and_of_what_its_lane_did_before():
    tasks = [task(GPU), task(CPU), task(OUT, 0, 1), task(GPU, 2), task(CPU, 0)]
    assert begun_by(tasks, [2.0, 3.0, 1.0, 1.0, 1.0]) == [ITERATION, ITERATION, "cpu C0a", "d2h Q0a", "cpu C0a"]
    assert begun_by(tasks, [5.0, 3.0, 1.0, 1.0, 1.0]) == [ITERATION, ITERATION, "gpu A0a", "d2h Q0a", "gpu A0a"]


def test_of_what_ends_at_once_the_first_need_let_a_task_begin():
    assert begun_by([task(GPU), task(CPU), task(OUT, 0, 1)], [2.0, 2.0, 1.0])[2] == "gpu A0a"
    assert begun_by([task(GPU), task(CPU), task(GPU, 1)], [2.0, 2.0, 1.0])[2] == "cpu C0a"  # and not its own lane


def test_a_task_without_work_stands_for_what_let_it_begin():
    tasks = [task(GPU), task(OUT, 0), task(CPU, 1)]
    assert begun_by(tasks, [2.0, 0.0, 1.0]) == [ITERATION, "gpu A0a", "gpu A0a"]
    blocked = [task(CPU), task(OUT, 0), task(OUT), task(GPU, 2)]  # the lane waits with its first transfer
    assert begun_by(blocked, [4.0, 0.0, 1.0, 1.0])[2:] == ["cpu C0a", "d2h Q0a"]


def test_small_transfers_pass_bulk_ones_but_bulk_ones_wait_for_the_lane():
    assert begun_by([bulk(), task(IN), bulk()], [4.0, 1.0, 2.0], 1.0) == [ITERATION, ITERATION, "h2d W0"]


def test_a_slowed_task_holds_its_lane_for_as_long_as_it_takes():
    busy = play(Turns.of([bulk(), task(GPU)], (0, 1)), [10.0, 2.0], 1.0, [0.0, 0.5]).busy
    assert (busy["h2d"], busy["gpu"]) == (10.0, 4.0)
