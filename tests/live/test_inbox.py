"""Requests that join or are cancelled while others are served: nobody gets another token for that."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

import workbench as wb
from tests.live.test_live_run import until
from tests.live.test_schedulers import SCHEDULERS
from tests.live.world import OF_SYSTEMS, WIRED, longest, requests, scenario
from workbench.core.errors import CapacityError, EngineError, WorkloadError
from workbench.engine import LiveRun
from workbench.engine.engine import Engine
from workbench.models import ModelConfig
from workbench.scheduler.registry import every_scheduler
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.workload import Request, Sampling
from workbench.workload.tokenizer import BYTES

ASKED = requests((5, 1, 19, 3, 7, 2, 24, 6), 14, seed=5)
CANCELS = {1: (0, 2), 3: (6,), 6: (7, 0)}
"""Requests that are cancelled during an iteration; one of them twice."""

During = Callable[[dict[int, Callable[[], object]]], None]


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> During:
    """Lets calls be made while iterations run, by their numbers."""
    execute = Engine.execute

    def set_up(calls: dict[int, Callable[[], object]]) -> None:
        def watched(self: Any, plan: Any, number: int, step: Any) -> Any:
            calls.get(number, lambda: None)()
            return execute(self, plan, number, step)

        monkeypatch.setattr(Engine, "execute", watched)

    return set_up


@pytest.fixture(scope="module")
def whole(tiny: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Every request alone."""
    return tuple(wb.run(scenario(tiny, (request,)), Sequential()).tokens[0] for request in ASKED)


def cancelling(of: wb.Scenario, schedule: Schedule, during: During) -> wb.Result:
    """A run of which requests are cancelled."""
    run: list[LiveRun] = []

    def cancel(numbers: Sequence[int]) -> None:
        for number in numbers:
            run[0].cancel(number)

    during({number: lambda gone=gone: cancel(gone) for number, gone in CANCELS.items()})
    run.append(wb.start(of, schedule))
    result = run[0].wait(60)
    assert list(run[0].stream())
    assert run[0].progress.total == run[0].progress.emitted == result.generated == sum(map(len, result.tokens))
    return result


def check(result: wb.Result, whole: Sequence[tuple[int, ...]]) -> None:
    gone = {number for numbers in CANCELS.values() for number in numbers}
    for number, (found, right) in enumerate(zip(result.tokens, whole, strict=True)):
        assert found == right[: len(found)]
        assert len(found) == 14 or number in gone
    ended = {number for number, tokens in enumerate(result.tokens) if len(tokens) == 14}
    assert set(result.latencies.request) == ended
    assert result.facts["cancelled"] == f"{len(ASKED) - len(ended)} requests"


@pytest.mark.parametrize("scheduler", [*every_scheduler(), *SCHEDULERS], ids=repr)
def test_nobody_else_gets_another_token_under_any_scheduler(
    scheduler: Any, tiny: ModelConfig, whole: Any, during: During
) -> None:
    of = scenario(tiny, ASKED, WIRED["all_gpu"], tokens=longest(ASKED) + 6, block=4, budget=30)
    check(cancelling(of.on(scheduler=scheduler), Sequential(2), during), whole)


@pytest.mark.parametrize(("name", "schedule"), [("vslpipe", VSLPipe()), *OF_SYSTEMS], ids=str)
def test_nor_under_any_schedule(name: str, schedule: Schedule, tiny: ModelConfig, whole: Any, during: During) -> None:
    of = scenario(tiny, ASKED, WIRED[name], tokens=longest(ASKED) + 6, block=4, budget=30)
    check(cancelling(of, schedule, during), whole)


def test_blocks_are_free_at_the_next_iteration(tiny: ModelConfig, during: During) -> None:
    """The cache holds one request; the second comes in as soon as the first is cancelled."""
    asked = requests((5, 5), 8)
    of = scenario(tiny, asked, WIRED["all_gpu"], tokens=12, block=4)
    run: list[LiveRun] = []
    during({2: lambda: run[0].cancel(0)})
    run.append(wb.start(of, Sequential()))
    result = run[0].wait(60)
    assert list(map(len, result.tokens)) == [3, 8]
    assert [number for number, tokens in enumerate(result.steps.prefill) if tokens] == [0, 3]
    assert result.steps.used_blocks[3] == 2


def test_a_run_of_which_all_is_cancelled_ends(tiny: ModelConfig, during: During) -> None:
    run: list[LiveRun] = []
    during({1: lambda: [run[0].cancel(number) for number in range(len(ASKED))]})
    run.append(wb.start(scenario(tiny, ASKED).on(scheduler=wb.ContinuousBatching()), Sequential()))
    result = run[0].wait(60)
    assert (result.iterations, result.facts["cancelled"]) == (2, "8 requests")
    assert not result.stopped
    held = wb.start(scenario(tiny, ASKED), Sequential())
    for number in range(len(ASKED)):
        held.cancel(number)  # while it loads
    with pytest.raises(EngineError, match="before its first iteration"):
        held.wait(60)


def test_a_request_that_has_not_arrived_is_not_awaited_once_it_is_cancelled(tiny: ModelConfig, whole: Any) -> None:
    of = scenario(tiny, ASKED[:3])
    run = wb.start(of.on(workload=of.workload.arriving(at=[0.0, 1000.0, 1001.0])), Sequential())
    run.cancel(2)
    until(lambda: run.progress.emitted == 14)
    run.cancel(1)
    assert run.wait(20).tokens == (whole[0], (), ())


# --------------------------------------------------------------------------------------------------------- joining


def joining(of: wb.Scenario, schedule: Schedule, during: During, calls: dict[int, Sequence[Request]]) -> wb.Result:
    """A run to which requests are added."""
    run: list[LiveRun] = []

    def join(further: Sequence[Request]) -> None:
        for request in further:
            numbers.append(run[0].add(request))

    numbers: list[int] = []
    during({number: lambda further=further: join(further) for number, further in calls.items()})
    run.append(wb.start(of, schedule))
    result = run[0].wait(60)
    assert numbers == list(range(len(of.workload), len(result.tokens)))
    assert result.facts["joined"] == f"{len(numbers)} requests"
    assert run[0].progress.total == run[0].progress.emitted == result.generated == sum(map(len, result.tokens))
    assert result.latencies.request == tuple(range(len(result.tokens)))
    assert all(time >= 0 for time in result.latencies.ttft)
    return result


@pytest.mark.parametrize("scheduler", [*every_scheduler(), *SCHEDULERS], ids=repr)
def test_who_joins_gets_the_same_tokens_under_any_scheduler(
    scheduler: Any, tiny: ModelConfig, whole: Any, during: During
) -> None:
    """Wherever it comes: with preemptions, and with requests that are longer, shorter and more than at first."""
    order = (6, 0, 1, 2, 3, 4, 5, 7)
    asked = [ASKED[number] for number in order]
    of = scenario(tiny, asked[:2], WIRED["all_gpu"], tokens=longest(ASKED) + 6, block=4, budget=30)
    result = joining(of.on(scheduler=scheduler), Sequential(2), during, {1: asked[2:4], 6: asked[4:]})
    assert result.tokens == tuple(whole[number] for number in order)


@pytest.mark.parametrize(("name", "schedule"), [("vslpipe", VSLPipe()), *OF_SYSTEMS], ids=str)
def test_who_joins_during_the_last_iteration_begins_anew(
    name: str, schedule: Schedule, tiny: ModelConfig, whole: Any, during: During
) -> None:
    """The plan knew it to be the last, and brought no weights for the next; then again."""
    of = scenario(tiny, ASKED[6:7], WIRED[name])
    result = joining(of, schedule, during, {13: ASKED[:1], 27: ASKED[2:4]})
    assert result.iterations == 3 * 14
    assert result.tokens == (whole[6], whole[0], whole[2], whole[3])


def test_who_joins_can_be_cancelled_and_may_sample(tiny: ModelConfig, whole: Any, during: During) -> None:
    run: list[LiveRun] = []
    how = Sampling(0.8, seed=3, stop=(BYTES.decode(whole[0][3:5]),), logprobs=1)
    drawn = replace(ASKED[0], sampling=replace(how, temperature=0.0))
    during({2: lambda: [run[0].add(ASKED[1]), run[0].add(drawn), run[0].cancel(1)], 5: lambda: run[0].add(ASKED[3])})
    run.append(wb.start(scenario(tiny, ASKED[6:7]), Sequential()))
    result = run[0].wait(60)
    assert result.tokens == (whole[6], (), whole[0][: len(result.tokens[2])], whole[3])
    assert 0 < len(result.tokens[2]) == len(result.logprobs[2]) <= 5
    assert (result.facts["joined"], result.facts["cancelled"]) == ("3 requests", "1 requests")


def test_who_joins_is_served_at_once_where_others_are_still_to_arrive(tiny: ModelConfig, whole: Any) -> None:
    of = scenario(tiny, ASKED[5:7])
    run = wb.start(of.on(workload=of.workload.arriving(at=[0.0, 1000.0])), Sequential())
    until(lambda: run.progress.emitted == 14)
    assert run.add(ASKED[0]) == 2
    until(lambda: run.progress.emitted == 28)
    run.cancel(1)
    assert run.wait(20).tokens == (whole[5], (), whole[0])


def test_who_cannot_join_is_told_why(tiny: ModelConfig) -> None:
    run = wb.start(scenario(tiny, ASKED[:2]), Sequential())
    with pytest.raises(CapacityError, match=r"a request of 6 \+ 1 tokens is too long .* prompts of 5 and 19"):
        run.add(Request((1,) * 6, 1))
    with pytest.raises(CapacityError, match=r"1 \+ 19 tokens"):
        run.add(Request((1,), 19))
    with pytest.raises(EngineError, match="request 2 has the token id 97"):
        run.add(Request((97,), 1))
    with pytest.raises(WorkloadError, match="is no Request"):
        run.add((1, 2))  # type: ignore[arg-type]
    run.wait(60)
    with pytest.raises(EngineError, match="the run has ended and takes no further request"):
        run.add(ASKED[0])


@pytest.mark.parametrize("number", [-1, 8, 1.5, "first"])
def test_a_request_that_there_is_not_is_named(number: Any, tiny: ModelConfig) -> None:
    run = wb.start(scenario(tiny, ASKED), Sequential())
    with pytest.raises(WorkloadError, match=r"has no request .*; give a number from 0 to 7"):
        run.cancel(number)
    assert "cancelled" not in run.wait(60).facts
