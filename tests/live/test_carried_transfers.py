"""A transfer that runs on over its plan's end: nobody waits for it there, and the next plan waits for all of it."""

import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from workbench.core.errors import StoppedError
from workbench.engine.lanes.executor import Executor
from workbench.engine.lanes.transfer import ArrayCopy, Transfer
from workbench.pipeline.layer_graph import EMBED, HEAD, WEIGHTS
from workbench.schedules.plan import Carry, Task

OUT = Task(WEIGHTS, 1, None, (0,), ((1, 0),), bulk=True, carry=Carry.OUT)
REST = Task(WEIGHTS, 1, None, (), bulk=True, carry=Carry.IN)
BEFORE, BESIDE, AFTER = Task(EMBED, -1, 0), Task(EMBED, -1, 0), Task(HEAD, -1, 0, (0,))
FIRST, SECOND = [BEFORE, OUT], [REST, AFTER, BESIDE]
SECONDS = 0.2


@pytest.fixture
def executor() -> Iterator[Executor]:
    lanes = Executor(1e7, 1e7, throttled=True, packet_seconds=5e-3)
    yield lanes
    lanes.close()


def nothing() -> None:
    """A task without work."""


def slow() -> Transfer:
    source = np.ones(int(SECONDS * 1e7), np.uint8)
    return Transfer([ArrayCopy(np.zeros_like(source), source)])


def transfer(executor: Executor, action: Callable[[], object]) -> list:
    """The first plan's jobs; its transfer has begun, and may have ended."""
    return executor.run(FIRST, [nothing, action])


def test_the_plan_ends_before_the_transfer_and_the_next_waits_for_it(executor):
    begin = time.perf_counter()
    _, out = transfer(executor, slow)
    assert time.perf_counter() - begin < SECONDS / 2
    assert not out.done
    rest, after, _ = executor.run(SECOND, [nothing] * 3)
    assert rest is out
    assert rest.bytes == int(SECONDS * 1e7)
    assert begin + SECONDS * 0.8 < rest.end <= after.start


def test_what_does_not_need_it_does_not_wait(executor):
    transfer(executor, slow)
    rest, beside, _ = executor.run([REST, BESIDE, Task(HEAD, -1, 0, (0, 1))], [nothing] * 3)
    assert beside.end < rest.end


def test_a_transfer_that_has_ended_meanwhile_holds_nobody(executor):
    _, out = transfer(executor, nothing)
    while not out.done:
        time.sleep(1e-3)
    rest, after, _ = executor.run(SECOND, [nothing] * 3)
    assert rest is out
    assert after.done


def test_its_error_is_that_of_the_plan_that_waits_for_it(executor):
    def fail() -> Transfer:
        time.sleep(0.05)
        raise ZeroDivisionError

    transfer(executor, fail)
    with pytest.raises(ZeroDivisionError):
        executor.run(SECOND, [nothing] * 3)


def test_stopping_does_not_wait_for_it(executor):
    transfer(executor, slow)
    executor.control.stop()
    begin = time.perf_counter()
    with pytest.raises(StoppedError):
        executor.run(SECOND, [nothing] * 3)
    executor.close()
    assert time.perf_counter() - begin < SECONDS / 2


def test_nothing_is_kept_alive_after_closing(executor):
    source = np.ones(100, np.uint8)
    alive = weakref.ref(source)
    copies = [ArrayCopy(np.zeros_like(source), source)]
    transfer(executor, lambda copies=copies: Transfer(copies))
    executor.close()
    del source, copies
    assert alive() is None


def test_closing_ends_it_even_while_it_is_held_at_the_gate(executor):
    _, out = transfer(executor, slow)
    executor.control.gate.clear()
    executor.close()
    assert out.done
    assert out.end - out.start < SECONDS / 2


@pytest.mark.parametrize(("size", "packets"), [(5_000, 4), (50_000, 4), (100_000, 8), (64, 1)])
def test_small_tensors_share_a_packet_and_large_ones_are_cut(executor, monkeypatch, size, packets):
    """Forty tensors at 50 kB a packet: the mover stops, and wants the interpreter, once for each packet."""
    paced = list[int]()
    lane = executor.lanes["h2d"]
    monkeypatch.setattr(lane, "_pace", paced.append)
    count = 40 if size < 50_000 else 4
    sources = [np.full(size, number, np.uint8) for number in range(count)]
    targets = [np.zeros_like(source) for source in sources]
    copies = list(map(ArrayCopy, targets, sources))
    lane._packet = 50_000
    executor.run([Task(WEIGHTS, 1, None, bulk=True)], [lambda: Transfer(copies)])
    assert len(paced) == packets
    assert sum(paced) == size * count
    assert all((copy.target == copy.source).all() for copy in copies)
