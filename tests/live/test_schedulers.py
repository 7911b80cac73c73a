"""Every scheduler live: the same greedy tokens, the batches of `simulate`, requests that arrive, experts counted."""

import math
import threading
import time
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import workbench as wb
from tests.examples import examples
from tests.live.test_law8 import CHECKS, live_and_virtual
from tests.live.world import RUNNABLE, computed_by, longest, machine, requests, scenario
from workbench.core.energy import Energy
from workbench.core.errors import EngineError, ScenarioError
from workbench.engine.lanes import meter as meters
from workbench.engine.lanes.meter import Meter, processors
from workbench.engine.model import ops
from workbench.models import ModelConfig
from workbench.scheduler.registry import every_scheduler
from workbench.schedules import Schedule, Sequential, VSLPipe

ASKED = requests((5, 1, 19, 3, 70, 2, 4, 6, 1, 11), (14, 9, 3, 14, 5, 14, 8, 14, 14, 5), seed=5)
DEEP = ModelConfig("deep", 5, 32, 24, 4, 2, 8, 4, 2, 97, 512, dtype="fp32")
SCHEDULERS = (
    wb.StaticBatching(2, 3),
    wb.ContinuousBatching(40),
    wb.ChunkedPrefill(9),
    wb.ChunkedPrefill(8),  # pieces end where blocks end
    wb.LayeredPrefill(8),
    wb.LayeredPrefill(2),
)
OTHERS = [one for one in every_scheduler() if type(one) not in {wb.ResourceAware, *map(type, SCHEDULERS)}]
"""Schedulers of the package that stand nowhere above, as their examples have them."""
IN_PIECES = ("all_gpu", "flexgen_s4", "all_cpu")


@pytest.fixture(scope="module")
def deep(make_model: Any) -> ModelConfig:
    return make_model(DEEP, 1)


@pytest.fixture(scope="module")
def right(deep: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return tuple(wb.run(scenario(deep, (request,)), Sequential()).tokens[0] for request in ASKED)


def asked_of(model: ModelConfig, scheduler: Any, pipeline: str, *, spare: int = 40, block: int = 8) -> wb.Scenario:
    of = scenario(model, ASKED, RUNNABLE[pipeline], tokens=longest(ASKED) + spare, block=block)
    return of.on(scheduler=scheduler)


# ---------------------------------------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("pipeline", IN_PIECES)
@pytest.mark.parametrize("scheduler", [*SCHEDULERS, *OTHERS], ids=repr)
def test_every_scheduler_gives_the_same_tokens(scheduler: Any, pipeline: str, deep: ModelConfig, right: Any) -> None:
    """Pieces of prompts read what went before from the cache, on either device or fetched."""
    assert wb.run(asked_of(deep, scheduler, pipeline), Sequential(2)).tokens == right


@pytest.mark.parametrize("scheduler", [SCHEDULERS[0], SCHEDULERS[1], wb.LayeredPrefill(20)], ids=repr)
def test_whole_prompts_in_vslpipe(scheduler: Any, deep: ModelConfig, right: Any) -> None:
    """A layered prefill needs no earlier piece while its prompt is at most granularity x layers long."""
    assert wb.run(asked_of(deep, scheduler, "vslpipe"), VSLPipe()).tokens == right


KNOBS = {
    "scheduler": st.one_of(
        st.builds(wb.StaticBatching, st.integers(1, 3), st.none() | st.integers(1, 5), st.integers(1, 90)),
        st.builds(wb.ContinuousBatching, st.integers(1, 90)),
        st.builds(wb.ChunkedPrefill, st.integers(1, 40)),
        st.builds(wb.LayeredPrefill, st.integers(1, 30)),
    ),
    "pipeline": st.sampled_from(IN_PIECES),
    "schedule": st.sampled_from([Sequential(1), Sequential(2), Sequential(3, prefetch=True)]),
    "block": st.integers(1, 40),
    "spare": st.sampled_from([0, 0, 5, 30, 300]),
}


@examples(80, CHECKS)
@given(**KNOBS)
def test_no_knob_of_any_scheduler_changes_a_token(
    deep: ModelConfig, right: Any, scheduler: Any, pipeline: str, schedule: Schedule, block: int, spare: int
) -> None:
    result = wb.run(asked_of(deep, scheduler, pipeline, spare=spare, block=block), schedule)
    assert result.tokens == right


def test_a_prefill_in_flight_is_preempted_live_and_nothing_changes(deep: ModelConfig, right: Any) -> None:
    for scheduler in (wb.ChunkedPrefill(4), wb.LayeredPrefill(3)):
        result = wb.run(asked_of(deep, scheduler, "all_gpu", spare=0, block=1), Sequential())
        assert result.tokens == right
        assert result.preemptions > 0


def test_the_shipped_model_answers_alike_under_every_scheduler() -> None:
    model = wb.checkpoint(wb.data_path("models/tiny-moe"))
    asked = wb.make_exam(6, wb.load_tokenizer(model), prompt_len=(0, 60)).workload.requests
    of = scenario(model, asked, RUNNABLE["all_gpu"], tokens=600)
    answers = [
        wb.run(of.on(scheduler=scheduler), Sequential(2)).tokens for scheduler in (of.scheduler, *SCHEDULERS[1:4])
    ]
    assert all(tokens == answers[0] for tokens in answers)


# ---------------------------------------------------------------------------------------------- live and simulated


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=repr)
def test_simulate_reproduces_the_batches_of_a_live_run(scheduler: Any, deep: ModelConfig) -> None:
    run, *virtual = live_and_virtual(asked_of(deep, scheduler, "all_gpu", spare=10, block=4), Sequential(2))
    assert len(run.seen) > 15
    for other in virtual:
        assert other.seen == run.seen


def test_experts_are_counted_as_rows_were_routed(deep: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert with a row counts once per layer and part; chunks load more of them than layers do."""
    seen: list[int] = []
    original = ops.Ops.route

    def route(self: Any, layout: Any, read: Any, weights: Any) -> Any:
        h, gates = original(self, layout, read, weights)
        seen.append(len(set(gates[:, : deep.num_experts_per_tok].flatten().tolist())))
        return h, gates

    computed_by(monkeypatch, "route", route)
    chunked = wb.run(asked_of(deep, wb.ChunkedPrefill(9), "all_gpu", spare=300), Sequential())
    assert chunked.expert_bytes == sum(seen) * deep.expert_params * 4
    layered = wb.run(asked_of(deep, wb.LayeredPrefill(9), "all_gpu", spare=300), Sequential())
    assert layered.expert_bytes < chunked.expert_bytes


def test_pieces_that_cannot_read_the_cache_are_refused_before_any_work(deep: ModelConfig) -> None:
    with pytest.raises(ScenarioError, match=r"prefill_attention.*fetch\(kv\)"):
        wb.run(asked_of(deep, wb.ChunkedPrefill(9), "vslpipe"), VSLPipe())


# ------------------------------------------------------------------------------------------------- requests that arrive


@pytest.mark.parametrize("scheduler", SCHEDULERS[1:4], ids=repr)
def test_requests_that_arrive_are_served_live(scheduler: Any, deep: ModelConfig, right: Any) -> None:
    of = asked_of(deep, scheduler, "all_gpu", spare=300)
    at = [0.1 * number for number in range(len(ASKED))]
    result = wb.run(of.on(workload=of.workload.arriving(at=at)), Sequential())
    assert result.tokens == right
    assert result.seconds >= at[-1]
    assert (result.latencies.ttft > 0).all()
    assert result.latencies.arrival == tuple(at)
    assert len(result.latencies.tbt) == sum(len(tokens) - 1 for tokens in right)


def test_a_run_that_waits_for_a_request_can_be_stopped_and_paused(deep: ModelConfig) -> None:
    of = asked_of(deep, wb.ContinuousBatching(40), "all_gpu")
    run = wb.start(of.on(workload=of.workload.arriving(at=[0.0] * 9 + [3600.0])), Sequential())
    until = time.perf_counter() + 60
    while run.progress.emitted < 60 and time.perf_counter() < until:
        time.sleep(0.02)
    time.sleep(0.3)
    run.pause()
    assert run.state is wb.RunState.PAUSED
    run.stop()
    result = run.wait(10)
    assert result.stopped
    assert set(result.latencies.request) <= set(range(9))


def test_a_run_that_nobody_has_come_to_yet_can_be_stopped(deep: ModelConfig) -> None:
    of = asked_of(deep, wb.ContinuousBatching(40), "all_gpu")
    run = wb.start(of.on(workload=of.workload.arriving(at=[3600.0] * len(ASKED))), Sequential())
    threading.Timer(1.0, run.stop).start()
    with pytest.raises(EngineError, match="stopped before its first iteration"):
        run.wait(60)


# --------------------------------------------------------------------------------------------------------------- energy


def test_the_processors_counters_are_summed_and_may_begin_again_at_zero(tmp_path: Any) -> None:
    for package, (now, most) in enumerate([(5_000_000, 9_000_000), (1_000_000, 9_000_000)]):
        folder = tmp_path / f"intel-rapl:{package}"
        folder.mkdir()
        (folder / "energy_uj").write_text(str(now))
        (folder / "max_energy_range_uj").write_text(str(most))
    meter = processors(tmp_path)
    assert meter is not None
    assert meter.read().joules == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("7000000")
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("500000")
    assert meter.read().joules == pytest.approx(2 + 8.5)
    assert meter.read().joules == pytest.approx(2 + 8.5)
    assert meter.read().source.startswith("RAPL")


@pytest.mark.parametrize(("on_card", "told"), [(True, "the processors; the GPUs"), (False, "the processors")])
def test_a_run_on_a_card_counts_the_energy_of_the_gpus_too(on_card: bool, told: str, monkeypatch: Any) -> None:
    count = [0.0, 0.0]
    monkeypatch.setattr(meters, "processors", lambda: Meter("the processors", [(lambda: count[0], math.inf)]))
    monkeypatch.setattr(meters, "gpus", lambda: Meter("the GPUs", [(lambda: count[1], math.inf)]))
    meter = meters.energy_meter(on_card=on_card)
    assert meter is not None
    count[:] = 3.0, 4.0
    assert meter.read() == Energy(7.0 if on_card else 3.0, told)


def test_what_counts_no_energy_is_left_out(monkeypatch: Any) -> None:
    monkeypatch.setattr(meters, "processors", lambda: None)
    monkeypatch.setattr(meters, "gpus", lambda: None)
    assert meters.energy_meter(on_card=True) is None
    monkeypatch.setattr(meters, "gpus", lambda: Meter("the GPUs", []))
    alone = meters.energy_meter(on_card=True)
    assert alone is not None
    assert alone.read().source == "the GPUs"


def test_where_nothing_is_counted_the_model_says_so(tmp_path: Any, tiny: ModelConfig, monkeypatch: Any) -> None:
    assert processors(tmp_path) is None
    of = scenario(tiny, ASKED[:2], on=machine())
    monkeypatch.setattr(meters, "processors", lambda: None)
    assert wb.run(of, Sequential()).energy.source.startswith("model")
    ticks = iter(range(1000))
    monkeypatch.setattr(meters, "processors", lambda: Meter("RAPL", [(lambda: float(next(ticks)), 1e9)]))
    assert wb.run(of, Sequential()).energy.source == "RAPL"
