"""Laws 2 and 8 live: what ran is what was asked for, `simulate` makes the same plans, no knob changes a token."""

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import workbench as wb
from tests.examples import examples
from tests.live.world import (
    OF_SYSTEMS,
    QWEN2,
    RUNNABLE,
    SCHEDULES,
    WIRED,
    lane_threads,
    longest,
    machine,
    requests,
    scenario,
    ways,
)
from workbench.core.errors import CapacityError, EngineError
from workbench.core.result import Result, Source
from workbench.core.timeline import ITERATION
from workbench.engine import engine, runnable
from workbench.engine.lanes.transfer import Transfer
from workbench.engine.model import forward, kv_cache, weights
from workbench.models import ModelConfig
from workbench.scheduler.block_manager import BlockManager
from workbench.schedules import KTransformers, Schedule, Sequential, Step, VSLPipe
from workbench.schedules.plan import Plan
from workbench.serving import fits, prepare, serve
from workbench.simulate.clock import IterationClock, TaskClock

ASKED = requests((5, 1, 19, 3, 7, 2, 4, 6, 1, 11), (14, 9, 3, 14, 1, 14, 8, 14, 14, 5), seed=5)


class Recording:
    """A clock that writes down every plan it is given, and the block table it refers to."""

    def __init__(self, clock: Any) -> None:
        self.clock, self.seen = clock, []

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def timeline(self) -> Any:
        return self.clock.timeline

    def begin(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.clock.begin(blocks)

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        held = {s: self.blocks.table[s, :n].tolist() for s, n in enumerate(self.blocks.held) if n}
        self.seen.append((plan.schedule, plan.parts, plan.tasks, number, step, held))
        return self.clock.execute(plan, number, step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.clock, name)


def live_and_virtual(of: wb.Scenario, schedule: Schedule) -> list[Recording]:
    seen = []
    for clock, source in (
        (engine.Engine, Source.MEASURED),
        (TaskClock, Source.SIMULATED),
        (IterationClock, Source.SIMULATED),
    ):
        prepared = prepare(of, schedule)
        recording = Recording(clock(prepared))
        try:
            serve(prepared, recording, source)
        finally:
            if isinstance(recording.clock, engine.Engine):
                recording.clock.close()
        seen.append(recording)
    return seen


@pytest.mark.parametrize(("name", "schedule"), ways(), ids=str)
@pytest.mark.parametrize("block", [1, 8])
def test_simulate_reproduces_a_live_run(name: str, schedule: Schedule, block: int, tiny: ModelConfig) -> None:
    check_reproduced(name, schedule, block, tiny)


@pytest.mark.parametrize(("name", "schedule"), [*OF_SYSTEMS, ("deferring", KTransformers())], ids=str)
def test_simulate_reproduces_a_live_run_of_every_system(name: str, schedule: Schedule, tiny: ModelConfig) -> None:
    check_reproduced(name, schedule, 8, tiny)


def test_simulate_reproduces_a_live_run_with_shared_experts(make_model: Callable[..., ModelConfig]) -> None:
    check_reproduced("shared_beside", KTransformers(), 8, make_model(QWEN2))


def check_reproduced(name: str, schedule: Schedule, block: int, model: ModelConfig) -> None:
    of = scenario(model, ASKED, WIRED[name], tokens=24, block=block, budget=30)
    run, *virtual = live_and_virtual(of, schedule)
    assert len(run.seen) > 20
    assert any(len(held) > 1 for *_, held in run.seen)
    for other in virtual:
        assert other.seen == run.seen
    assert Step.FIRST in run.seen[0][4]
    assert Step.LAST in run.seen[-1][4]
    assert not any(seen[4] for seen in run.seen[1:-1])


def test_results_tell_the_same_story(tiny: ModelConfig) -> None:
    of = scenario(tiny, ASKED, tokens=24, block=1, budget=30)
    measured, simulated = wb.run(of, VSLPipe()), wb.simulate(of, VSLPipe())
    assert measured.preemptions == simulated.preemptions >= 5
    for column in ("prefill", "decode", "used_blocks"):
        assert getattr(measured.steps, column) == getattr(simulated.steps, column)
    for field in ("generated", "processed", "iterations", "recomputed", "facts"):
        assert getattr(measured, field) == getattr(simulated, field)
    assert measured.source is Source.MEASURED
    assert simulated.source is Source.SIMULATED
    assert [len(row) for row in measured.tokens] == [request.output_len for request in ASKED]


def test_live_spans_never_overlap_on_a_lane(tiny: ModelConfig) -> None:
    """A lane runs one task at a time; a small transfer that passes a bulk one is not charged twice to the lane.

    The link is slow, so that every weight transfer is a bulk one of many packets with small ones in between.
    """
    of = scenario(tiny, ASKED[:6], on=machine(link=5e7, throttled=True))
    result = wb.run(of, VSLPipe(packet_seconds=1e-4))
    for lane in ("gpu", "cpu", "d2h", "h2d"):
        spans = sorted(span for span in result.timeline if span.lane == lane)
        covered, reach = 0.0, 0.0
        for span in sorted(spans, key=lambda span: span.start):
            covered += max(0.0, span.end - max(span.start, reach))
            reach = max(reach, span.end)
        assert result.busy[lane] <= covered * 1.001 + 1e-6, f"{lane}: busy for longer than anything ran on it"
        assert result.busy[lane] <= result.seconds


def test_live_tasks_tell_which_other_let_them_begin(tiny: ModelConfig) -> None:
    """It had ended by then; attention waits for its lane or a transfer, never for the GPU itself."""
    result = wb.run(scenario(tiny, ASKED[:6]), VSLPipe())
    for number in range(result.iterations):
        spans = list(result.timeline.window(number, number + 1))
        first = {f"{s.lane} {s.name}": s.end for s in reversed(spans)}  # the weights of layer 0 can come twice
        begun = [span for span in spans if span.after in first]
        assert len(begun) > len(spans) / 2
        assert {span.after for span in spans} - first.keys() <= {ITERATION}
        assert [span for span in begun if first[span.after] > span.start] == []
        assert "gpu" not in {span.after.partition(" ")[0] for span in begun if span.name.startswith("C")}


# ---------------------------------------------------------------------------------------------- what ran is read back


@pytest.fixture
def of(tiny: ModelConfig) -> Iterator[wb.Scenario]:
    yield scenario(tiny, ASKED[:4], block=4)
    assert not lane_threads()


def test_other_kv_capacity_raises(of: wb.Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kv_cache.KVCache.__init__
    monkeypatch.setattr(
        kv_cache.KVCache, "__init__", lambda self, m, blocks, *rest, **how: original(self, m, blocks + 1, *rest, **how)
    )
    with pytest.raises(EngineError, match="KV blocks"):
        wb.run(of, VSLPipe())


def test_other_kv_precision_raises(of: wb.Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    original = kv_cache.KVCache.__init__
    monkeypatch.setattr(
        kv_cache.KVCache,
        "__init__",
        lambda self, m, blocks, size, _, control, **how: original(self, m, blocks, size, "bf16", control, **how),
    )
    with pytest.raises(EngineError, match="precision"):
        wb.run(of, VSLPipe())


def test_other_weight_precision_raises(of: wb.Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    original = weights.WeightStore.__init__
    monkeypatch.setattr(
        weights.WeightStore,
        "__init__",
        lambda self, model, precision, *rest: original(self, model, precision._replace(weights="bf16"), *rest),
    )
    with pytest.raises(EngineError):
        wb.run(of, VSLPipe())


def test_other_placement_raises(of: wb.Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that was asked for on the cpu and never ran there is told."""
    compute = forward.Forward.compute

    def without_the_cpu(self: Any, stage: Any, layer: int, part: int, layout: Any) -> None:
        if stage.device is not forward.Place.CPU:
            compute(self, stage, layer, part, layout)
        else:
            self._buffers[forward.Place.CPU, part, "attn"] = torch.zeros(layout.rows, of.model.q_size)

    monkeypatch.setattr(forward.Forward, "compute", without_the_cpu)
    with pytest.raises(EngineError, match="placement"):
        wb.run(of, VSLPipe())


def dropping(original: Callable[..., Any]) -> Callable[..., Any]:
    """A transfer that forgets its last copy."""

    def drop(*args: Any, **options: Any) -> Any:
        answer = original(*args, **options)
        transfer = answer[1] if isinstance(answer, tuple) else answer
        if transfer is None or not transfer.copies:
            return answer
        less = Transfer(list(transfer.copies)[:-1], transfer.arrived)
        return (answer[0], less) if isinstance(answer, tuple) else less

    return drop


@pytest.mark.parametrize(
    ("pipeline", "owner", "name"),
    [
        ("vslpipe", forward.Forward, "move"),
        ("vslpipe", weights.WeightBuffer, "transfer"),
        ("flexgen_s4", forward.Forward, "store_kv"),
        ("flexgen_s4", kv_cache.KVCache, "fetch"),
    ],
)
def test_a_copy_that_was_dropped_raises(
    pipeline: str, owner: type, name: str, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, dropping(getattr(owner, name)))
    with pytest.raises(EngineError, match="moved"):
        wb.run(scenario(tiny, ASKED[:4], RUNNABLE[pipeline], block=4), Sequential(2))


def test_run_asks_for_everything_it_needs(of: wb.Scenario) -> None:
    assert runnable.check_runnable(prepare(of, VSLPipe())) is None


def test_fetched_kv_counts_against_the_gpu_limit(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`limit(gpu_memory=...)` is enforced: what `fetch(kv)` brings is in the ledger, or it is refused."""
    of = scenario(tiny, requests([120] * 12, 4), RUNNABLE["flexgen_s4"], budget=2000)
    found = fits(of, Sequential()).gpu
    with pytest.raises(CapacityError, match="fetched KV"):
        wb.run(of.on(machine=machine().limit(gpu_memory=found.total - 1)), Sequential())
    brought: list[int] = []
    fetch = kv_cache.KVCache.fetch

    def watched(self: Any, layer: int, layout: Any) -> Any:
        fetched, transfer = fetch(self, layer, layout)
        brought.append(fetched.pool.nbytes)
        return fetched, transfer

    monkeypatch.setattr(kv_cache.KVCache, "fetch", watched)
    wb.run(of.on(machine=machine().limit(gpu_memory=found.total)), Sequential())
    assert max(brought) == found["fetched KV"]


# ------------------------------------------------------------------------------------------------------- law 2, drawn


@pytest.fixture(scope="module")
def right(tiny: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return tuple(wb.run(scenario(tiny, (request,)), Sequential()).tokens[0] for request in ASKED)


KNOBS = {
    "budget": st.integers(1, 120),
    "block": st.integers(1, 40),
    "spare": st.integers(0, 120),
    "schedule": st.sampled_from([*SCHEDULES, Sequential(3), VSLPipe(packet_seconds=1e-9)]),
    "order": st.randoms(use_true_random=False),
}


def no_knob_changes_a_token(
    tiny: ModelConfig, right: Any, budget: int, block: int, spare: int, schedule: Schedule, order: Any
) -> Result:
    places = list(range(len(ASKED)))
    order.shuffle(places)
    asked = tuple(ASKED[place] for place in places)
    result = wb.run(scenario(tiny, asked, tokens=longest(asked) + spare, block=block, budget=budget), schedule)
    assert result.tokens == tuple(right[place] for place in places)
    return result


CHECKS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@examples(80, CHECKS)
@given(**KNOBS)
def test_no_knob_changes_a_token(tiny: ModelConfig, right: Any, **knobs: Any) -> None:
    no_knob_changes_a_token(tiny, right, **knobs)


def test_the_same_knobs_give_the_same_plans(tiny: ModelConfig) -> None:
    """Law 7, as far as a live run can keep it: the order of batches does not depend on how fast tasks were."""
    of = scenario(tiny, ASKED, tokens=24, block=1, budget=30)
    first, second = (wb.run(of, VSLPipe()) for _ in range(2))
    assert first.tokens == second.tokens
    assert np.array_equal(first.steps.used_blocks, second.steps.used_blocks)
