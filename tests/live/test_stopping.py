"""A live run ends soon after it was asked to, whatever it is at: long work looks between steps of bounded length."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from tests.live.test_live_run import until
from tests.live.world import FAMILIES, RUNNABLE, machine, requests, scenario
from workbench.core.errors import EngineError, StoppedError
from workbench.engine.lanes.control import Control
from workbench.engine.model import kv_cache, ops
from workbench.engine.model.forward import Forward
from workbench.engine.model.ops import Chunks, RowLayout
from workbench.engine.model.sampler import choose_all
from workbench.hardware import usable_cores
from workbench.models import ModelConfig
from workbench.scheduler.base import Scheduler
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.serving import prepare
from workbench.stages import Precision, Rows, Stage, decode_attention, experts
from workbench.workload import Request, Sampling

pytestmark = pytest.mark.alone

STEPS = 20
FP32 = Precision("fp32", "fp32")


class Watched(Control):
    """Counts the looks, and ends the work at the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.looks, self.last = 0, -1

    def check(self) -> None:
        self.looks += 1
        if self.looks == self.last:
            self.stop()
        super().check()


def many_rows() -> RowLayout:
    """Two prompts, the second the rest of one that 40 entries are there of, and 50 decodes."""
    lengths, held = [150, 70], np.full(50, 100)
    chunks = Chunks(np.array([0, 40]), np.arange(6).reshape(2, 3).astype(np.int32), np.ones(2, bool))
    table, rows = np.arange(350).reshape(50, 7).astype(np.int32), sum(lengths) + len(held)
    return RowLayout(lengths, torch.arange(rows) % 90, np.arange(rows) + 5600, table, held, chunks)


def work_of(stage: Stage, model: ModelConfig, layout: RowLayout) -> tuple[float, float]:
    """FLOP and bytes that it declares for the rows of a part."""
    pairs = sum(n * (n + 1) / 2 + n * b for n, b in zip(layout.prefill_len, layout.before.tolist(), strict=True))
    assert stage.op.work is not None
    work = stage.op.work(Rows(layout.prefill, len(layout.lengths), pairs, float(layout.lengths.sum()), 0), model, FP32)
    return work.flops, work.bytes


@pytest.mark.parametrize("config", FAMILIES.values(), ids=lambda config: config.name)
def test_every_operation_looks_as_often_as_its_work_is_long(
    config: ModelConfig, make_model: Callable[..., ModelConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty steps of it, by the work that the operation declares; a look that stops it is its last."""
    model, watched, layout = make_model(config), Watched(), many_rows()
    prepared = prepare(scenario(model, requests((200, 90), 2), RUNNABLE["all_gpu"], tokens=8192), Sequential())
    forward = Forward(prepared, watched)
    forward.embed(0, [number % 90 for number in range(layout.rows)])
    seen = set()
    for stage in prepared.lowering.stack.stages(0):
        flops, size = work_of(stage, model, layout)
        monkeypatch.setattr(ops, "STEP_FLOPS", flops / STEPS)
        monkeypatch.setattr(kv_cache, "STEP_BYTES", size / STEPS)
        watched.looks = 0
        forward.compute(stage, 0, 0, layout)
        if stage.op.name in {"route", "combine"}:  # as short as a look: they read no more than their rows
            continue
        seen.add(stage.op.name)
        looks = watched.looks
        assert looks >= 0.7 * STEPS, stage
        watched.looks, watched.last = 0, looks // 2
        with pytest.raises(StoppedError):
            forward.compute(stage, 0, 0, layout)
        assert watched.looks == looks // 2, stage
        watched.ending, watched.last = False, -1
    assert seen >= {"qkv", "prefill_attention", decode_attention.name, "out_proj", "experts"}


def test_the_head_looks_too(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, layout = Watched(), many_rows()
    forward = Forward(prepare(scenario(tiny, requests((200, 90), 2), RUNNABLE["all_gpu"]), Sequential()), watched)
    forward.embed(0, [0] * layout.rows)
    monkeypatch.setattr(ops, "STEP_FLOPS", 2.0 * tiny.hidden_size * tiny.vocab_size)
    watched.looks = 0
    logits = forward.logits(0, layout)
    assert watched.looks == len(logits) == 52
    request = Request((0,), 1, Sampling(temperature=1.0, seed=1))
    choose_all(logits, [request] * 52, [request.prompt] * 52, watched.check)
    assert watched.looks == 104


def test_loading_looks_at_every_layer(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forward, "_compile", lambda *_: None)  # it looks too
    for name in ("all_gpu", "vslpipe"):
        prepared, watched = prepare(scenario(tiny, requests((5,), 2), RUNNABLE[name]), Sequential()), Watched()
        forward = Forward(prepared, watched)
        forward.warm_up()
        assert watched.looks >= 2 * tiny.num_hidden_layers
        looks, watched.looks, watched.last = watched.looks, 0, watched.looks // 2
        with pytest.raises(StoppedError):
            Forward(prepared, watched).warm_up()
        assert looks // 2 <= watched.looks < looks // 2 + usable_cores()  # another thread may look once more


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("vslpipe", wb.ResourceAware(token_budget=64)),
        ("flexgen_s4", wb.ChunkedPrefill(16)),
        ("all_gpu", wb.ChunkedPrefill(16)),
        ("all_cpu", wb.ResourceAware(token_budget=64)),
    ],
)
def test_steps_change_no_token(
    name: str, scheduler: Scheduler, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = scenario(tiny, requests((40, 9, 33, 12), 12), RUNNABLE[name]).on(scheduler=scheduler)
    whole = wb.run(case, Sequential()).tokens
    monkeypatch.setattr(ops, "STEP_FLOPS", 2e3)
    monkeypatch.setattr(kv_cache, "STEP_BYTES", 1e3)
    assert wb.run(case, Sequential()).tokens == whole


@pytest.mark.parametrize("schedule", [Sequential(), VSLPipe()], ids=str)
def test_a_packet_of_a_minute_is_not_waited_for(schedule: Schedule, tiny: ModelConfig) -> None:
    """The smallest packet takes a minute over such a link."""
    live_run = wb.start(scenario(tiny, requests((5, 9), 3), on=machine(link=1e3, throttled=True)), schedule)
    until(lambda: live_run.state is not wb.RunState.LOADING)
    live_run.stop()
    until(lambda: live_run.state.ended, 20)
    with pytest.raises(EngineError, match="stopped before its first iteration"):
        live_run.wait(1)


def test_an_error_in_one_lane_ends_long_work_in_another(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is the error that is raised, not that the other was stopped."""
    operate, long_work, ended = Forward._operate, threading.Event(), threading.Event()

    def lasting(self: Forward, stage: Stage, *rest: Any) -> None:
        if stage.op is experts:
            long_work.set()
            try:
                while True:
                    self._control.check()
                    self._control.sleep(1.0)
            finally:
                ended.set()
        operate(self, stage, *rest)

    def struck(self: Forward, stage: Stage, layer: int, part: int, layout: RowLayout) -> None:
        if part:
            assert long_work.wait(20)
            raise ZeroDivisionError("struck")

    monkeypatch.setattr(Forward, "_operate", lasting)
    monkeypatch.setattr(Forward, "_attend", struck)
    with pytest.raises(ZeroDivisionError):
        wb.run(scenario(tiny, requests((5, 9, 3), 3)), VSLPipe())
    assert ended.is_set()


@pytest.mark.parametrize("end", [Control.stop, Control.drain])
def test_what_ends_is_not_held(end: Callable[[Control], None]):
    control = Control()
    control.hold()
    assert not control.gate.is_set()
    end(control)
    control.hold()
    assert control.gate.is_set()
