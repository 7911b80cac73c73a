"""Requests that are cancelled while they are served: their blocks are free, and nobody else gets another token."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import workbench as wb
from tests.live.test_schedulers import SCHEDULERS
from tests.live.world import OF_SYSTEMS, WIRED, longest, requests, scenario
from workbench.core.errors import EngineError, WorkloadError
from workbench.engine import LiveRun
from workbench.engine.engine import Engine
from workbench.models import ModelConfig
from workbench.scheduler.registry import every_scheduler
from workbench.schedules import Schedule, Sequential, VSLPipe

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


def test_a_request_that_has_not_arrived_can_be_cancelled(tiny: ModelConfig, whole: Any) -> None:
    of = scenario(tiny, ASKED[:2])
    run = wb.start(of.on(workload=of.workload.arriving(at=[0.0, 0.5])), Sequential())
    run.cancel(1)
    assert run.wait(60).tokens == (whole[0], ())


@pytest.mark.parametrize("number", [-1, 8, 1.5, "first"])
def test_a_request_that_there_is_not_is_named(number: Any, tiny: ModelConfig) -> None:
    run = wb.start(scenario(tiny, ASKED), Sequential())
    with pytest.raises(WorkloadError, match=r"has no request .*; give a number from 0 to 7"):
        run.cancel(number)
    assert "cancelled" not in run.wait(60).facts
