"""Tasks without an action: they keep their turn on the lane, take no time and wait for no packet."""

import time
from collections.abc import Iterator

import numpy as np
import pytest

from workbench.engine.lanes.executor import Executor
from workbench.engine.lanes.transfer import ArrayCopy, Transfer
from workbench.pipeline.layer_graph import EMBED, HEAD, WEIGHTS, Node, NodeKind
from workbench.schedules.plan import Task

RATE = 1e7
PACKET = 0.1
MOVE = Node(NodeKind.MOVE, "H", "h2d")
WORK = Node(NodeKind.SEGMENT, "C", "cpu")


@pytest.fixture
def executor() -> Iterator[Executor]:
    lanes = Executor(RATE, RATE, throttled=True, packet_seconds=PACKET)
    yield lanes
    lanes.close()


def stream() -> Transfer:
    source = np.ones(int(3 * PACKET * RATE), np.uint8)
    return Transfer([ArrayCopy(np.zeros_like(source), source)])


def briefly() -> None:
    time.sleep(0.02)


def test_it_waits_for_no_packet(executor: Executor) -> None:
    tasks = [Task(WEIGHTS, 0, None, bulk=True), Task(EMBED, -1, 0), Task(MOVE, 0, 0, (1,)), Task(HEAD, -1, 0, (2,))]
    weights, _, move, head = executor.run(tasks, [stream, briefly, None, briefly])
    assert weights.start < move.start == move.end <= head.start
    assert head.end < weights.start + PACKET
    assert not weights.pauses


def test_it_waits_for_the_task_before_it_and_the_next_waits_for_it(executor: Executor) -> None:
    """As on a lane, although neither stands in the other's `after`."""
    tasks = [Task(WORK, 0, 0), Task(EMBED, -1, 0), Task(WORK, 0, 1, (1,)), Task(HEAD, -1, 0, (2,)), Task(WORK, 0, 2)]
    long = lambda: time.sleep(0.1)  # noqa: E731
    first, embed, empty, head, last = executor.run(tasks, [long, briefly, None, briefly, briefly])
    assert embed.end < first.end <= empty.start <= head.start
    first, embed, empty, head, last = executor.run(tasks, [briefly, long, None, briefly, briefly])
    assert first.end < embed.end <= empty.start <= last.start


def test_a_plan_without_work_ends(executor: Executor) -> None:
    tasks = [Task(WORK, number, 0, (number - 1,) if number else ()) for number in range(5000)]
    jobs = executor.run(tasks, [None] * len(tasks))
    assert all(job.done for job in jobs)
