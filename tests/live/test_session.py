"""A session serves whoever comes, with the tokens of a run, on a model that is loaded once."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import workbench as wb
from tests.live.test_live_run import until
from tests.live.test_schedulers import SCHEDULERS
from tests.live.world import WIRED, longest, requests, scenario
from workbench.core.errors import CapacityError, EngineError, StoppedError, WorkloadError
from workbench.engine import End, Session, Told, engine, session
from workbench.models import ModelConfig
from workbench.scheduler.registry import every_scheduler
from workbench.schedules import Sequential
from workbench.workload import Request, Sampling
from workbench.workload.tokenizer import BYTES

ASKED = requests((5, 1, 19, 3, 7, 2, 24, 6), 14, seed=5)
PLANNED = (Request((0,) * (longest(ASKED) + 1 - 14), 14),) * 4


@pytest.fixture(scope="module")
def whole(tiny: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Every request alone."""
    return tuple(wb.run(scenario(tiny, (request,)), Sequential()).tokens[0] for request in ASKED)


def opened(tiny: ModelConfig, scheduler: Any = None, tokens: int = 4096) -> Session:
    of = scenario(tiny, PLANNED, WIRED["all_gpu"], tokens=tokens, block=4, budget=30)
    return Session(of if scheduler is None else of.on(scheduler=scheduler), Sequential())


class Asker:
    """Somebody who asks for one request and keeps what is told."""

    def __init__(self, of: Session, request: Request) -> None:
        self.told: queue.SimpleQueue[Told | BaseException] = queue.SimpleQueue()
        self.ticket = of.ask(request, self.told.put)

    def next(self) -> Told:
        told = self.told.get(timeout=60)
        assert isinstance(told, Told)
        return told

    def all(self) -> tuple[tuple[int, ...], End]:
        tokens: list[int] = []
        while True:
            told = self.next()
            tokens.append(told.token)
            if told.end is not None:
                assert self.told.empty()
                return tuple(tokens), told.end


def answers(of: Session, asked: Sequence[Request]) -> tuple[tuple[int, ...], ...]:
    askers = [Asker(of, request) for request in asked]
    return tuple(asker.all()[0] for asker in askers)


@pytest.mark.parametrize("scheduler", [*every_scheduler(), *SCHEDULERS], ids=repr)
def test_everybody_gets_the_tokens_of_a_run_under_any_scheduler(scheduler: Any, tiny: ModelConfig, whole: Any) -> None:
    """Together in a cache that makes them wait for one another, then one after the other on the same model."""
    with opened(tiny, scheduler, tokens=longest(ASKED) + 6) as served:
        assert answers(served, ASKED) == whole
        assert tuple(answers(served, [request])[0] for request in ASKED[:3]) == whole[:3]
        until(lambda: not served.used_blocks)
    assert served.failure is None


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Iterations wait until this is set."""
    gate = threading.Event()
    execute = engine.Engine.execute

    def later(self: Any, *given: Any) -> Any:
        gate.wait(0.05)
        return execute(self, *given)

    monkeypatch.setattr(engine.Engine, "execute", later)
    return gate


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests of each round that is over."""
    found: list[int] = []
    serve = session.serve

    def counted(*given: Any) -> Any:
        result = serve(*given)
        found.append(int(result.facts["joined"].split()[0]))
        return result

    monkeypatch.setattr(session, "serve", counted)
    return found


def test_a_round_takes_no_more_than_so_many(
    tiny: ModelConfig, whole: Any, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ROUND_REQUESTS", 3)
    with opened(tiny, wb.ContinuousBatching(max_running=2)) as served:
        assert answers(served, ASKED * 2) == whole * 2
    assert rounds == [3, 3, 3, 3, 3, 1]


@pytest.mark.usefixtures("slow")
def test_a_round_takes_nobody_after_so_many_iterations(
    tiny: ModelConfig, whole: Any, rounds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ROUND_ITERATIONS", 5)
    with opened(tiny) as served:
        first = Asker(served, ASKED[6])
        for _ in range(5):
            first.next()
        second = Asker(served, ASKED[0])
        assert (first.all()[0], second.all()[0]) == (whole[6][5:], whole[0])
    assert rounds == [1, 1]


def test_nothing_is_kept_of_the_iterations_that_are_over(tiny: ModelConfig) -> None:
    with opened(tiny) as served:
        asker = Asker(served, ASKED[0])
        asker.next()
        loaded = served._desk.engine
        assert loaded is not None
        asker.all()
        assert len(loaded.timeline.spans) <= 2 * 4  # those of an iteration or two


def test_ends_are_told_apart(tiny: ModelConfig, whole: Any) -> None:
    stop = whole[0][3]
    text = BYTES.decode(whole[0][2:4])
    with opened(tiny) as served:
        for how in (Sampling(stop_token_ids=(stop,)), Sampling(stop=(text,)), Sampling(stop_token_ids=(96,))):
            tokens, end = Asker(served, Request(ASKED[0].prompt, 14, how)).all()
            ended = how.stop_token_ids != (96,) or 96 in whole[0]
            assert end is (End.STOP if ended else End.LENGTH)
            assert tokens == whole[0][: len(tokens)]
            assert (len(tokens) < 14) == ended
        last = Sampling(stop_token_ids=(whole[0][13],))
        assert Asker(served, Request(ASKED[0].prompt, whole[0].index(whole[0][13]) + 1, last)).all()[1] is End.STOP


def test_log_probabilities_come_with_their_tokens(tiny: ModelConfig) -> None:
    with opened(tiny) as served:
        asked = Request(ASKED[0].prompt, 5, Sampling(logprobs=2))
        asker, other = Asker(served, asked), Asker(served, ASKED[1])
        for _ in range(5):
            told = asker.next()
            assert told.logprobs is not None
            assert told.logprobs.best[0] == (told.token, told.logprobs.logprob)
        assert other.next().logprobs is None


def test_who_cancels_frees_blocks_and_the_others_get_their_tokens(
    tiny: ModelConfig, whole: Any, slow: threading.Event
) -> None:
    with opened(tiny) as served:
        staying, going = Asker(served, ASKED[0]), Asker(served, ASKED[6])
        going.next()
        assert served.used_blocks > 6
        served.cancel(going.ticket)
        until(lambda: 0 < served.used_blocks <= 5)
        slow.set()
        assert staying.all()[0] == whole[0]
        until(lambda: not served.used_blocks)
        served.cancel(going.ticket)
        served.cancel(staying.ticket)
        assert Asker(served, ASKED[2]).all()[0] == whole[2]


def test_who_cancels_before_it_is_served_is_never_served(tiny: ModelConfig, whole: Any) -> None:
    with opened(tiny) as served:
        going = Asker(served, ASKED[6])  # the model is not loaded yet
        served.cancel(going.ticket)
        assert Asker(served, ASKED[2]).all()[0] == whole[2]
        assert going.told.empty()


def test_everybody_is_told_when_it_is_closed(tiny: ModelConfig, slow: threading.Event) -> None:
    served = opened(tiny)
    running, waiting = Asker(served, ASKED[0]), Asker(served, ASKED[6])
    running.next()
    waiting.next()
    served.close()
    for asker in (running, waiting):
        told = [asker.told.get(timeout=20)]
        while not asker.told.empty():
            told.append(asker.told.get())
        assert isinstance(told[-1], StoppedError)
    with pytest.raises(EngineError, match=r"the session has ended \(it was closed\)"):
        served.ask(ASKED[0], print)
    wb.run(scenario(tiny, ASKED[:1]), Sequential())


def test_everybody_is_told_why_it_failed(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))
    logits: Callable[..., Any] = engine.Forward.logits

    def failing(self: Any, *rest: Any) -> Any:
        if next(calls) == 3:
            raise ZeroDivisionError("struck")
        return logits(self, *rest)

    monkeypatch.setattr(engine.Forward, "logits", failing)
    with opened(tiny) as served:
        asker = Asker(served, ASKED[0])
        for _ in range(3):
            asker.next()
        assert isinstance(asker.told.get(timeout=20), ZeroDivisionError)
        until(lambda: served.failure is not None)
        with pytest.raises(EngineError, match="struck"):
            served.ask(ASKED[0], print)
        with pytest.raises(ZeroDivisionError):
            served.wait()


def test_what_cannot_be_served_is_refused_and_leaves_nothing(tiny: ModelConfig) -> None:
    with opened(tiny) as served:
        with pytest.raises(CapacityError, match=r"a request of 30 \+ 9 tokens is too long .* planned for 38"):
            served.ask(Request((1,) * 30, 9), print)
        with pytest.raises(EngineError, match="token id 97"):
            served.ask(Request((97,), 1), print)
        with pytest.raises(WorkloadError, match="is no Request"):
            served.ask((1, 2), print)  # type: ignore[arg-type]
        with pytest.raises(EngineError, match="a session with 'tiny-0' goes on in this process"):
            wb.run(scenario(tiny, ASKED), Sequential())
        served.wait()
        assert served.used_blocks == 0
