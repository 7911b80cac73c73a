"""Nothing is left behind: no KV block, no thread, no open file, whatever stage fails and whoever interrupts."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from tests.live.world import RUNNABLE, Countdown, computed_by, files_in_use, lane_threads, machine, requests, scenario
from workbench.engine import engine, live
from workbench.engine.lanes.lane import Lane
from workbench.engine.lanes.mover import Mover
from workbench.engine.model import forward, kv_cache, ops, weights
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline
from workbench.scheduler.block_manager import BlockCounts
from workbench.schedules import Schedule, Sequential, VSLPipe
from workbench.stages import BUILT_IN

pytestmark = pytest.mark.alone

ASKED = requests((5, 1, 19, 3, 7, 2), 6, seed=5)
TOKENS, BLOCK = 24, 4


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[BlockCounts]:
    """Every block manager that a run opens."""
    seen: list[BlockCounts] = []

    begin = engine.Engine.begin

    def seen_begin(clock: engine.Engine, blocks: BlockCounts) -> None:
        seen.append(blocks)
        begin(clock, blocks)

    monkeypatch.setattr(engine.Engine, "begin", seen_begin)
    return seen


def small(model: ModelConfig, pipeline: Pipeline = RUNNABLE["vslpipe"]) -> wb.Scenario:
    return scenario(model, ASKED, pipeline, tokens=TOKENS, block=BLOCK, budget=60)


@pytest.fixture(scope="module")
def right(tiny: ModelConfig) -> tuple[tuple[int, ...], ...]:
    return wb.run(scenario(tiny, ASKED), Sequential()).tokens


@pytest.fixture
def mine(tiny: ModelConfig, tmp_path: Path) -> ModelConfig:
    """A copy of the tiny checkpoint for this test alone: a failed test's traceback keeps its files mapped."""
    assert tiny.path is not None
    return wb.checkpoint(shutil.copytree(tiny.path, tmp_path / "mine"))


def nothing_is_left(model: ModelConfig, opened: list[BlockCounts]) -> None:
    assert opened
    for blocks in opened:
        blocks.check()
        assert blocks.free == blocks.total
        assert not blocks.used
    assert not lane_threads()
    assert model.path is not None
    assert not files_in_use(model.path)


@pytest.mark.parametrize("schedule", [Sequential(2), VSLPipe()], ids=str)
def test_after_a_good_run(schedule: Schedule, mine: ModelConfig, right: Any, opened: list[BlockCounts]) -> None:
    result = wb.run(small(mine), schedule)
    assert result.tokens == right
    assert result.preemptions
    nothing_is_left(mine, opened)


# ------------------------------------------------------------------------------------------------ errors inside stages

Strike = Callable[[pytest.MonkeyPatch, Countdown], None]


def in_op(name: str) -> Strike:
    def arm(patch: pytest.MonkeyPatch, strike: Countdown) -> None:
        original = getattr(ops.Ops, name)

        def struck(*args: Any) -> Any:
            strike()
            return original(*args)

        computed_by(patch, name, struck)

    return arm


def in_method(owner: type, name: str, *, after: bool = False) -> Strike:
    def arm(patch: pytest.MonkeyPatch, strike: Countdown) -> None:
        original = getattr(owner, name)

        def struck(*args: Any, **options: Any) -> Any:
            if not after:
                strike()
            answer = original(*args, **options)
            if after:
                strike()
            return answer

        patch.setattr(owner, name, struck)

    return arm


def when_arrived(owner: type, name: str) -> Strike:
    """In what a transfer does when its copies are made."""

    def arm(patch: pytest.MonkeyPatch, strike: Countdown) -> None:
        original = getattr(owner, name)

        def transfer(*args: Any) -> Any:
            answer = original(*args)
            done = answer.arrived

            def arrived() -> None:
                strike()
                done()

            answer.arrived = arrived
            return answer

        patch.setattr(owner, name, transfer)

    return arm


def in_copy(lane: str) -> Strike:
    """Between the packets of a transfer, on that lane."""

    def arm(patch: pytest.MonkeyPatch, strike: Countdown) -> None:
        original = Mover._pace

        def pace(self: Any, size: int) -> None:
            if self.name == f"lane-{lane}":
                strike()
            original(self, size)

        patch.setattr(Mover, "_pace", pace)

    return arm


def in_move(lane: str) -> Strike:
    def arm(patch: pytest.MonkeyPatch, strike: Countdown) -> None:
        original = forward.Forward.move

        def move(self: Any, node: Any, *rest: Any) -> Any:
            if node.lane == lane:
                strike()
            return original(self, node, *rest)

        patch.setattr(forward.Forward, "move", move)

    return arm


PLACES: dict[str, tuple[str, Strike]] = {
    **{
        op: ("vslpipe", in_op(op)) for op in BUILT_IN if hasattr(ops.Ops, op) and op != "shared_experts"
    },  # the model here has none
    "decode_attention": ("vslpipe", in_method(kv_cache.KVCache, "attend")),
    "append": ("vslpipe", in_method(kv_cache.KVCache, "append")),
    "embed": ("vslpipe", in_method(engine.Engine, "_embed")),
    "head": ("vslpipe", in_method(engine.Engine, "_emit")),
    "head, half done": ("vslpipe", in_method(engine.Engine, "_emit", after=True)),
    "offload": ("vslpipe", in_move("d2h")),
    "load": ("vslpipe", in_move("h2d")),
    "d2h packet": ("vslpipe", in_copy("d2h")),
    "h2d packet": ("vslpipe", in_copy("h2d")),
    "weights asked": ("vslpipe", in_method(weights.WeightBuffer, "transfer")),
    "weights arrived": ("vslpipe", when_arrived(weights.WeightBuffer, "transfer")),
    "weights read": ("vslpipe", in_method(weights.WeightBuffer, "get")),
    "fetch kv": ("flexgen_s4", in_method(kv_cache.KVCache, "fetch")),
    "store kv": ("flexgen_s4", in_method(forward.Forward, "store_kv")),
    "kv stored": ("flexgen_s4", when_arrived(forward.Forward, "store_kv")),
    "fetched attention": ("flexgen_s4", in_method(kv_cache.FetchedKV, "attend")),
    "enter": ("all_cpu", in_move("d2h")),
    "leave": ("all_cpu", in_move("h2d")),
    "plan": ("vslpipe", in_method(ops.RowLayout, "of")),
    "bytes checked": ("vslpipe", in_method(engine.Engine, "_check_bytes")),
}


class StruckError(Exception):
    """Not one of the engine's own."""


@pytest.mark.parametrize("place", PLACES)
def test_after_an_error(
    place: str, mine: ModelConfig, right: Any, opened: list[BlockCounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, arm = PLACES[place]
    schedule = VSLPipe() if name == "vslpipe" else Sequential(2)
    strike = Countdown(5, StruckError(place))
    with monkeypatch.context() as patch:
        arm(patch, strike)
        with pytest.raises(StruckError, match=place):
            wb.run(small(mine, RUNNABLE[name]), schedule)
    strike.error = None  # its traceback holds the engine's frames
    nothing_is_left(mine, opened)
    assert wb.run(small(mine, RUNNABLE[name]), schedule).tokens == right


@pytest.mark.parametrize("calls", [0, 1, 25])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError], ids=lambda error: error.__name__)
def test_after_any_kind_of_error(
    error: type[BaseException],
    calls: int,
    mine: ModelConfig,
    opened: list[BlockCounts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first call of a stage and a later one; errors that `except Exception` would let pass."""
    strike = Countdown(calls, error("struck"))
    in_op("experts")(monkeypatch, strike)
    with pytest.raises(error):
        wb.run(small(mine), VSLPipe())
    assert strike.fired
    strike.error = None
    nothing_is_left(mine, opened)


def test_after_an_error_while_opening(mine: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the engine does after its threads have started must not leave them."""
    with monkeypatch.context() as patch:

        def broken(*args: Any, **options: Any) -> None:
            raise StruckError("no bar")

        patch.setattr(live, "tqdm", broken)
        with pytest.raises(StruckError):
            wb.run(small(mine), VSLPipe())
    left = lane_threads()
    _end_lanes()
    assert not left


def test_after_an_error_while_closing(mine: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar that cannot be closed (a notebook's comm, a closed stderr) does not keep the threads."""
    with monkeypatch.context() as patch:

        def broken(self: Any) -> None:
            raise StruckError("no bar")

        patch.setattr(live.tqdm, "close", broken)
        with pytest.raises(StruckError):
            wb.run(small(mine), VSLPipe())
    left = lane_threads()
    _end_lanes()
    assert not left


def _end_lanes() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, Lane):
            thread.inbox.put(None)
            thread.join(10)


# ------------------------------------------------------------------------------------------------------- interruptions


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A process that was started in the background ignores SIGINT, and Python then raises no KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """What Ctrl-C does: SIGINT to the thread that waits in `run`."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[float], None]]:
    """Ctrl-C after some seconds; never after the test."""
    timers: list[threading.Timer] = []

    def after(seconds: float) -> None:
        timers.append(threading.Timer(seconds, interrupt))
        timers[-1].start()

    yield after
    for timer in timers:
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("place", ["experts", "decode_attention", "weights asked", "head", "offload"])
def test_interrupted_inside_a_stage(
    place: str, mine: ModelConfig, right: Any, opened: list[BlockCounts], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Press(Countdown):
        def __call__(self) -> None:
            self.calls -= 1
            if self.calls < 0 and not self.fired:
                self.fired = True
                interrupt()

    press = Press(9)
    with monkeypatch.context() as patch:
        PLACES[place][1](patch, press)
        with pytest.raises(KeyboardInterrupt):
            wb.run(small(mine), VSLPipe())
    assert press.fired
    nothing_is_left(mine, opened)
    assert wb.run(small(mine), VSLPipe()).tokens == right


@pytest.mark.parametrize("seconds", [0.05, 0.11, 0.23])
def test_interrupted_at_any_time(
    seconds: float, mine: ModelConfig, ctrl_c: Callable[[float], None], opened: list[BlockCounts]
) -> None:
    wb.run(small(mine), VSLPipe())  # everything is loaded and compiled
    many = scenario(mine, ASKED * 40, tokens=TOKENS, block=BLOCK, budget=60)
    ctrl_c(seconds)
    with pytest.raises(KeyboardInterrupt):
        wb.run(many, VSLPipe())
    nothing_is_left(mine, opened)


@pytest.mark.parametrize("schedule", [Sequential(), VSLPipe()], ids=str)
def test_interrupt_does_not_wait_for_a_slow_link(
    schedule: Schedule,
    make_model: Callable[..., ModelConfig],
    ctrl_c: Callable[[float], None],
    opened: list[BlockCounts],
) -> None:
    """A transfer takes many seconds over this link; Ctrl-C ends the run at the next packet, not after the layer."""
    model = make_model(ModelConfig("wide", 2, 64, 256, 4, 2, 16, 8, 2, 97, 512, dtype="fp32"))
    link = model.num_local_experts * model.expert_params * 4 / 20
    slow = scenario(model, ASKED, on=machine(link=link, throttled=True))
    wb.run(scenario(model, ASKED[:1]), schedule)  # everything is loaded and compiled
    ctrl_c(1.2)  # the transfer of experts is under way
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        wb.run(slow, schedule)
    assert time.perf_counter() - began < 6
    nothing_is_left(model, opened)


def test_an_impatient_user_presses_three_times(
    mine: ModelConfig, ctrl_c: Callable[[float], None], opened: list[BlockCounts]
) -> None:
    many = scenario(mine, ASKED * 40, tokens=TOKENS, block=BLOCK, budget=60)
    for seconds in (0.3, 0.301, 0.303):
        ctrl_c(seconds)
    presses = 0
    for task in (lambda: wb.run(many, VSLPipe()), lambda: time.sleep(0.3), lambda: time.sleep(0.2)):
        try:
            task()
        except KeyboardInterrupt:
            presses += 1
    assert presses
    nothing_is_left(mine, opened)


THREADS = """
import sys, threading, torch
import workbench as wb
from tests.live.world import requests, scenario
from workbench.schedules import VSLPipe

def fresh():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]

torch.set_num_threads(3)
before = torch.get_num_threads(), fresh(), torch.is_grad_enabled()
wb.run(scenario(wb.checkpoint(sys.argv[1]), requests((3, 4), 3)), VSLPipe())
after = torch.get_num_threads(), fresh(), torch.is_grad_enabled()
assert before == (3, 3, True), before
assert after == before, f"before {before}, after {after}"
"""


def test_torch_threads_are_as_before(tiny: ModelConfig) -> None:
    """The gpu lane's share of the cores is its own: a thread that the user starts afterwards keeps torch's number.

    In a fresh process, because every earlier run has left its mark on this one.
    """
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(tiny.path)], cwd=root, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
