"""Tokens of a live run as they come: all of them, in order, to any number of readers, whom the run never waits for."""

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

import workbench as wb
from tests.live.test_live_run import slow, until
from tests.live.world import longest, machine, requests, scenario
from workbench.core.errors import EngineError
from workbench.engine import engine
from workbench.engine.token_log import TokenLog
from workbench.models import ModelConfig
from workbench.schedules import Sequential, VSLPipe

__all__ = ["slow"]

ASKED = requests((5, 9, 3, 12), 12)


def by_request(pairs: Iterable[tuple[int, int]], count: int = len(ASKED)) -> tuple[tuple[int, ...], ...]:
    made: list[list[int]] = [[] for _ in range(count)]
    for request, token in pairs:
        made[request].append(token)
    return tuple(map(tuple, made))


@pytest.mark.parametrize("schedule", [Sequential(2), VSLPipe()], ids=str)
def test_every_token_comes_once_and_in_order(schedule: Any, tiny: ModelConfig) -> None:
    """Also those of requests that lose their cache and are computed again."""
    of = scenario(tiny, ASKED, tokens=longest(ASKED), block=1)
    run = wb.start(of, schedule)
    pairs = list(run.stream())
    result = run.wait(1)
    assert result.preemptions > 0
    assert by_request(pairs) == result.tokens
    assert len(pairs) == result.generated


def test_readers_may_be_many_and_late(tiny: ModelConfig) -> None:
    run = wb.start(scenario(tiny, ASKED), Sequential())
    found: list[list[tuple[int, int]]] = [[], []]
    readers = [threading.Thread(target=lambda seen=seen: seen.extend(run.stream())) for seen in found]
    for reader in readers:
        reader.start()
    result = run.wait(60)
    for reader in readers:
        reader.join(10)
    assert found[0] == found[1] == list(run.stream())
    assert by_request(found[0]) == result.tokens


@pytest.mark.usefixtures("slow")
def test_tokens_come_while_the_run_goes_on(tiny: ModelConfig) -> None:
    run = wb.start(scenario(tiny, ASKED), Sequential())
    stream = run.stream()
    first = next(stream)
    assert not run.state.ended
    assert run.progress.emitted < 12 * len(ASKED)
    assert first[0] in range(len(ASKED))
    until(lambda: run.progress.iterations)
    run.stop()
    run.wait(20)


def test_a_reader_that_reads_no_further_holds_nobody(tiny: ModelConfig) -> None:
    run = wb.start(scenario(tiny, ASKED), Sequential())
    stream = run.stream()
    taken = [next(stream)]
    result = run.wait(60)
    assert by_request([*taken, *stream]) == result.tokens


@pytest.mark.usefixtures("slow")
def test_a_run_that_is_stopped_ends_its_streams(tiny: ModelConfig) -> None:
    run = wb.start(scenario(tiny, ASKED), Sequential())
    until(lambda: run.progress.emitted > 4)
    run.stop()
    assert by_request(run.stream()) == run.wait(20).tokens


def test_a_run_that_is_stopped_before_it_has_a_token_ends_its_streams(tiny: ModelConfig) -> None:
    run = wb.start(scenario(tiny, ASKED, on=machine(link=1e3, throttled=True)), Sequential())
    run.stop()
    assert list(run.stream()) == []
    with pytest.raises(EngineError, match="stopped before its first iteration"):
        run.wait(20)


def test_a_run_that_fails_ends_its_streams_and_says_why(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, calls = engine.Forward.logits, iter(range(100))

    def failing(self: Any, *rest: Any) -> Any:
        if next(calls) == 3:
            raise ZeroDivisionError("struck")
        return logits(self, *rest)

    monkeypatch.setattr(engine.Forward, "logits", failing)
    run = wb.start(scenario(tiny, ASKED), Sequential())
    assert len(list(run.stream())) == 3 * len(ASKED)
    with pytest.raises(ZeroDivisionError):
        run.wait(20)


def test_an_ended_request_streams_its_stop_token_last(tiny: ModelConfig) -> None:
    of = scenario(tiny, ASKED)
    stop = wb.run(of, Sequential()).tokens[0][3]
    run = wb.start(of.on(workload=of.workload.stopping(at=[stop])), Sequential())
    mine = [token for request, token in run.stream() if request == 0]
    assert mine[-1] == stop
    assert stop not in mine[:-1]
    assert len(mine) <= 4
    run.wait(20)


def test_writing_waits_for_no_reader() -> None:
    log = TokenLog()
    stuck = log.follow()
    log.add([(0, 1)])
    assert next(stuck) == (0, 1)
    begin = time.monotonic()
    for number in range(10_000):
        log.add([(0, number)])
    log.end()
    assert time.monotonic() - begin < 5
    assert sum(1 for _ in stuck) == 10_000
