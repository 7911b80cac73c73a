"""The gpu lane of a card goes on to its next task while the card is at work; other lanes wait for what is over."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.live.world import lane_threads
from workbench.engine.devices.host import HostDriver, HostEvent, HostStream
from workbench.engine.lanes import ahead
from workbench.engine.lanes.executor import Executor
from workbench.engine.lanes.lane import Job
from workbench.pipeline.layer_graph import EMBED, Node, NodeKind
from workbench.schedules.plan import Task

WORK = Node(NodeKind.SEGMENT, "C", "cpu")
LASTS = 0.3
"""Seconds of every piece of work by the card's own clock."""


class Late(HostEvent):
    """An event that passes when the card is let go on."""

    def __init__(self, card: "Card") -> None:
        super().__init__()
        self._card = card

    def wait(self) -> None:
        assert self._card.goes_on.wait(10)
        if self._card.fault is not None:
            raise self._card.fault

    def seconds_since(self, earlier: HostEvent) -> float:
        return LASTS


class LateStream(HostStream):
    def __init__(self, card: "Card") -> None:
        self._card = card
        self._kept = list[object]()

    def record(self) -> Late:
        return Late(self._card)

    def keep(self, held: object) -> None:
        self._kept.append(held)

    def release(self) -> list[object]:
        kept, self._kept = self._kept, []
        return kept


class Card(HostDriver):
    """A card that ends nothing before it is let go on."""

    on_host = False

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.fault: Exception | None = None
        self.gpu = LateStream(self)

    def stream(self, name: str) -> HostStream:
        return self.gpu if name == "gpu" else HostStream()


class Run:
    """A plan of three tasks on a card, each after the one before, and one of the CPU after the first, under way."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.said = list[str]()
        self.executor = Executor(1e9, 1e9, throttled=False, packet_seconds=1.0, driver=card)
        self.jobs = list[Job]()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def begin(self, names: str = "123c") -> None:
        self.names = names
        self._thread.start()

    def _run(self) -> None:
        tasks = [Task(EMBED, 0, 0), Task(EMBED, 0, 0, (0,)), Task(EMBED, 0, 0, (1,)), Task(WORK, 0, 0, (0,))]
        try:
            self.jobs = self.executor.run(tasks, [self._saying(name) for name in self.names])
        except BaseException as error:
            self.error = error

    def _saying(self, name: str) -> Callable[[], object] | None:
        return None if name == "-" else lambda: self.said.append(name)

    def end(self) -> None:
        self.card.goes_on.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run(Card())
    yield made
    made.card.goes_on.set()
    made.executor.close()
    assert not lane_threads()


def said_by(run: Run, count: int) -> list[str]:
    """What has been said, once it is so much and a moment longer."""
    until = time.monotonic() + 10
    while len(run.said) < count and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.05)
    return list(run.said)


def test_the_next_task_is_issued_before_the_first_is_over(run: Run) -> None:
    run.begin()
    assert said_by(run, 2) == ["1", "2"], "the third waits for room, the CPU's for the end of the first"
    run.end()
    assert sorted(run.said) == ["1", "2", "3", "c"]
    assert all(job.done for job in run.jobs)


def test_with_room_for_one_each_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "AHEAD", 1)
    run = Run(Card())
    try:
        run.begin()
        assert said_by(run, 1) == ["1"]
    finally:
        run.end()
        run.executor.close()


def test_a_task_without_work_waits_for_the_end_of_the_one_before(run: Run) -> None:
    run.begin("1-3c")
    assert said_by(run, 1) == ["1"]
    run.end()
    assert sorted(run.said) == ["1", "3", "c"]


def test_what_is_kept_is_held_until_its_task_is_over(run: Run) -> None:
    class Tensor:
        gone = 0

        def __del__(self) -> None:
            Tensor.gone += 1

    run.executor.run([Task(WORK, 0, 0)], [lambda: None])
    run.card.gpu.keep(Tensor())
    run.begin()
    said_by(run, 2)
    assert Tensor.gone == 0
    run.end()
    assert Tensor.gone == 1


def test_a_fault_of_the_card_ends_the_plan(run: Run) -> None:
    run.begin()
    said_by(run, 2)
    run.card.fault = ValueError("lost")
    run.end()
    assert isinstance(run.error, ValueError)
    assert run.said == ["1", "2"], "what was not issued is drained"


def test_times_are_the_cards_and_tasks_do_not_overlap(run: Run) -> None:
    run.begin()
    said_by(run, 2)
    time.sleep(LASTS)
    run.end()
    first, second, third, _ = run.jobs
    assert first.end - first.start == pytest.approx(LASTS, abs=0.05)
    assert first.end <= second.start <= second.end <= third.start <= third.end
    assert run.executor.busy()["gpu"] == pytest.approx(sum(job.end - job.start for job in run.jobs[:3]))
