"""Requests that end before their output length, live: at a stop token, or where the workload lets them end."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

import workbench as wb
from tests.live.test_law8 import live_and_virtual
from tests.live.test_schedulers import SCHEDULERS
from tests.live.world import OF_SYSTEMS, RUNNABLE, WIRED, longest, requests, scenario
from workbench.core.errors import EngineError
from workbench.core.result import Result
from workbench.models import ModelConfig
from workbench.scheduler.registry import every_scheduler
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.workload import Request, Sampling, Workload
from workbench.workload.tokenizer import BYTES

ASKED = requests((5, 1, 19, 3, 7, 2, 4, 6, 1, 11), (14, 9, 14, 14, 1, 14, 8, 14, 14, 14), seed=5)
STOPS = (66, 1, 40, 81, 23, 52, 8, 95, 33, 70, 12, 47)
"""A dozen of the tiny model's 97 tokens, so that most requests meet one."""


def stopping(model: ModelConfig, pipeline: str = "all_gpu", *, spare: int = 6, block: int = 4) -> wb.Scenario:
    of = scenario(model, ASKED, WIRED[pipeline], tokens=longest(ASKED) + spare, block=block, budget=30)
    return of.on(workload=of.workload.stopping(at=STOPS))


def cut(tokens: tuple[int, ...], stops: tuple[int, ...] = STOPS) -> tuple[int, ...]:
    """Tokens up to the first that is a stop token."""
    first = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: first + 1]


def lengths(result: Result) -> list[int]:
    return [len(tokens) for tokens in result.tokens]


@pytest.fixture(scope="module")
def whole(tiny: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Every request alone, to its output length."""
    return tuple(wb.run(scenario(tiny, (request,)), Sequential()).tokens[0] for request in ASKED)


@pytest.fixture(scope="module")
def right(whole: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    cuts = tuple(map(cut, whole))
    ended = sum(len(mine) < len(all_of_it) for mine, all_of_it in zip(cuts, whole, strict=True))
    assert 3 <= ended < len(ASKED)
    return cuts


# ---------------------------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("scheduler", every_scheduler(), ids=repr)
def test_a_request_ends_with_its_first_stop_token(scheduler: Any, tiny: ModelConfig, right: Any) -> None:
    """Whoever shares its batches, and whoever comes in its place."""
    result = wb.run(stopping(tiny).on(scheduler=scheduler), Sequential(2))
    assert result.tokens == right
    assert result.generated == sum(map(len, right))
    assert result.latencies.request == tuple(range(len(ASKED)))
    assert len(result.latencies.tbt) == sum(len(tokens) - 1 for tokens in right)


@pytest.mark.parametrize(("name", "schedule"), [("vslpipe", VSLPipe()), *OF_SYSTEMS], ids=str)
def test_every_schedule_ends_them_alike(name: str, schedule: Schedule, tiny: ModelConfig, right: Any) -> None:
    """Also where the last iteration, which nobody knew to be the last, brings weights for one that never comes."""
    assert wb.run(stopping(tiny, name), schedule).tokens == right


def test_a_text_ends_a_request_as_a_token_does(tiny: ModelConfig, whole: Any) -> None:
    """Its tokens are bytes; each stops at two of its own, and its blocks are free for the next one."""
    spelled = [BYTES.decode(tokens[2:4]) if len(tokens) > 3 else "" for tokens in whole]
    asked = [
        replace(each, sampling=Sampling(stop=(text,) if text else ()))
        for each, text in zip(ASKED, spelled, strict=True)
    ]
    right = tuple(
        next((t[:n] for n in range(1, len(t)) if text and text in BYTES.decode(t[:n])), t)
        for t, text in zip(whole, spelled, strict=True)
    )
    assert sum(len(cut) == 4 for cut in right) >= 5
    of = scenario(tiny, asked, WIRED["all_gpu"], tokens=longest(ASKED) + 6, block=4, budget=30)
    result = wb.run(of, Sequential(2))
    assert result.tokens == right
    told = of.on(workload=of.workload.ending(at=lengths(result)))
    assert wb.simulate(told, Sequential(2)).steps.used_blocks == result.steps.used_blocks


def test_stop_tokens_are_each_requests_own(tiny: ModelConfig, whole: Any) -> None:
    own = [Sampling(stop_token_ids=(tokens[1],) if number % 2 else ()) for number, tokens in enumerate(whole)]
    asked = [Request(each.prompt, each.output_len, sampling) for each, sampling in zip(ASKED, own, strict=True)]
    result = wb.run(scenario(tiny, asked), Sequential())
    assert result.tokens == tuple(cut(t, s.stop_token_ids) for t, s in zip(whole, own, strict=True))


def test_a_request_may_end_with_its_first_token_or_its_last(tiny: ModelConfig, whole: Any) -> None:
    number = next(n for n, tokens in enumerate(whole) if len(tokens) > 1 and tokens[-1] not in tokens[:-1])
    for place in (0, len(whole[number]) - 1):
        asked = [replace(ASKED[number], sampling=Sampling(stop_token_ids=(whole[number][place],)))]
        assert wb.run(scenario(tiny, asked), Sequential()).tokens == (whole[number][: place + 1],)


def test_without_stop_tokens_all_go_on_to_their_output_length(tiny: ModelConfig, whole: Any) -> None:
    of = stopping(tiny)
    result = wb.run(of.on(workload=of.workload.stopping(at=[])), Sequential())
    assert result.tokens == whole
    assert "ended" not in result.facts


def test_a_run_ends_requests_where_the_workload_does(tiny: ModelConfig, whole: Any, right: Any) -> None:
    """With stop tokens too, whichever comes first."""
    of = stopping(tiny)
    at = [min(3, request.output_len) for request in ASKED]
    plain = of.workload.stopping(at=[]).ending(at=at)
    assert wb.run(of.on(workload=plain), Sequential()).tokens == tuple(t[:n] for t, n in zip(whole, at, strict=True))
    both = wb.run(of.on(workload=of.workload.ending(at=at)), Sequential())
    assert both.tokens == tuple(tokens[:end] for tokens, end in zip(right, at, strict=True))


# ---------------------------------------------------------------------------------------------- live and simulated


@pytest.mark.parametrize("scheduler", [*every_scheduler(), *SCHEDULERS], ids=repr)
def test_with_the_ends_of_a_run_simulate_has_its_batches(scheduler: Any, tiny: ModelConfig) -> None:
    of = stopping(tiny, spare=0, block=1).on(scheduler=scheduler)
    first = wb.run(of, Sequential(2))
    told = of.on(workload=of.workload.ending(at=lengths(first)))
    run, *virtual = live_and_virtual(told, Sequential(2))
    assert len(run.seen) == first.iterations
    for other in virtual:
        assert other.seen == run.seen
    again = wb.simulate(told, Sequential(2))
    assert first.preemptions > 0 or isinstance(scheduler, wb.StaticBatching)  # that one reserves what may be needed
    assert (again.steps.prefill, again.steps.decode) == (first.steps.prefill, first.steps.decode)
    assert again.steps.used_blocks == first.steps.used_blocks
    assert (again.preemptions, again.recomputed) == (first.preemptions, first.recomputed)


@pytest.mark.parametrize("schedule", [VSLPipe(), Sequential(2, prefetch=True)], ids=str)
def test_with_the_ends_of_a_run_all_readers_answer_one_question(schedule: Schedule, tiny: ModelConfig) -> None:
    of = stopping(tiny, "vslpipe")
    measured = wb.run(of, schedule)
    told = of.on(workload=of.workload.ending(at=lengths(measured)))
    least, simulated = wb.bound(told, schedule), wb.simulate(told, schedule)
    assert measured.same_question(simulated)
    assert measured.same_question(least)
    assert not measured.same_question(wb.simulate(of, schedule))
    assert measured.facts["ended"] == simulated.facts["ended"]
    assert least.generated == simulated.generated == measured.generated < of.workload.output_len.sum()
    assert least.seconds <= simulated.seconds * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------ blocks and numbers


def test_blocks_are_free_as_soon_as_a_request_ends(tiny: ModelConfig, whole: Any) -> None:
    """The cache holds one request at a time, and the second waits until the first one ends."""
    asked = [replace(each, output_len=8) for each in requests((5, 5), 8)]
    of = scenario(tiny, asked, RUNNABLE["all_gpu"], tokens=12, block=4)
    first = wb.run(of, Sequential()).tokens[0]
    stop = first[2]
    assert stop not in first[:2]
    of = of.on(workload=of.workload.stopping(at=[stop]))
    result = wb.run(of, Sequential())
    admitted = [number for number, tokens in enumerate(result.steps.prefill) if tokens]
    assert admitted[1] == 3
    assert result.steps.used_blocks[3] == 2


def test_progress_counts_down_to_what_is_generated(tiny: ModelConfig, right: Any) -> None:
    live = wb.start(stopping(tiny), Sequential())
    result = live.wait(60)
    assert live.progress.total == live.progress.emitted == result.generated == sum(map(len, right))


def test_the_mean_gap_is_over_the_tokens_that_came(tiny: ModelConfig) -> None:
    result = wb.run(stopping(tiny), Sequential())
    spent = [
        (last - first) / (count - 1)
        for first, last, count in zip(result.latencies.first, result.latencies.last, lengths(result), strict=True)
        if count > 1
    ]
    assert result.tbt == pytest.approx(sum(spent) / len(spent))


def test_a_result_with_short_answers_is_saved_and_comes_back(tiny: ModelConfig, tmp_path: Any, right: Any) -> None:
    result = wb.run(stopping(tiny), Sequential())
    found = Result.load(result.save(tmp_path / "result.json"))
    assert found.tokens == right
    assert found.latencies == result.latencies
    assert found.facts == result.facts


def test_a_stop_token_that_the_model_cannot_sample_is_refused(tiny: ModelConfig) -> None:
    of = stopping(tiny)
    with pytest.raises(EngineError, match="request 0 has the token id 97, 'tiny-0' knows 0 to 96"):
        wb.run(of.on(workload=of.workload.stopping(at=[97])), Sequential())


def test_requests_that_arrive_end_too(tiny: ModelConfig, right: Any) -> None:
    of = stopping(tiny)
    at = [0.03 * number for number in range(len(ASKED))]
    assert wb.run(of.on(workload=of.workload.arriving(at=at)), Sequential()).tokens == right


def test_with_a_temperature_a_request_ends_alike_in_any_batch(tiny: ModelConfig) -> None:
    asked = requests((5, 1, 19, 3), 14, seed=5, t=0.8)
    of = Workload.of(asked).stopping(at=STOPS)
    alone = tuple(wb.run(scenario(tiny, (each,)), Sequential()).tokens[0] for each in of.requests)
    assert any(len(tokens) < 14 for tokens in alone)
    together = scenario(tiny, of.requests, RUNNABLE["all_gpu"], tokens=longest(asked), block=2)
    assert wb.run(together, Sequential(2)).tokens == alone
    assert all(before not in STOPS for tokens in alone for before, _ in pairwise(tokens))
