"""Nothing of the process stays changed, however live runs begin, overlap and end, and whenever Python ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import workbench as wb
from tests.live.test_live_run import ASKED, slow, until
from tests.live.world import requests, scenario
from workbench.core.errors import EngineError
from workbench.engine import RunState
from workbench.models import ModelConfig
from workbench.schedules import Sequential, VSLPipe

ROOT = Path(__file__).parents[2]
LASTING = requests((5, 9, 3, 12), 200)

STATE = """
import os, signal, sys, threading, warnings

def fresh():
    import torch
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]

def state():
    import torch
    signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    threads = torch.get_num_threads(), fresh(), torch.is_grad_enabled()
    names = sorted(thread.name for thread in threading.enumerate())
    pool = [name for name in names if name.startswith("kernels-cpu")]  # begun when they are first needed, and kept
    assert len(pool) <= 2 * (os.cpu_count() or 1), pool
    names = [name for name in names if name not in pool]
    return dict(os.environ), sys.getswitchinterval(), signals, cores, threads, names, sys.excepthook, list(sys.path)

def same(before, after):
    assert before == after, [pair for pair in zip(before, after) if pair[0] != pair[1]]
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, because every earlier run has left its mark on this one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    words = [sys.executable, "-c", STATE + code, *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)


IMPORTING = """
environment, seconds = dict(os.environ), sys.getswitchinterval()
if sys.argv[1] == "torch first":
    import torch
    before = state()
import workbench.engine
if sys.argv[1] == "torch first":
    same(before, state())
assert dict(os.environ) == environment, set(os.environ.items()) ^ set(environment.items())
assert sys.getswitchinterval() == seconds
"""


@pytest.mark.parametrize("order", ["torch first", "engine first"])
def test_importing_the_engine_changes_nothing(order: str) -> None:
    done = python(IMPORTING, order)
    assert not done.returncode, done.stderr


OVERLAPPING = """
import torch
import workbench as wb
from tests.live.world import requests, scenario
from workbench.core.errors import EngineError
from workbench.schedules import Sequential, VSLPipe

torch.set_num_threads(3)
sys.setswitchinterval(0.004)
model = wb.checkpoint(sys.argv[1])
case = scenario(model, requests((5, 9, 3, 12), 12))
long = scenario(model, requests((5, 9, 3, 12), 50))
wb.run(case, VSLPipe())
before = state()

def overlap(first, second):
    begun = wb.start(first, VSLPipe())
    other = wb.start(second, Sequential(), alongside=True)
    yield begun, other
    begun.wait(60), other.wait(60)
    same(before, state())

for first, second in ((case, long), (long, case)):
    for _ in overlap(first, second):
        pass
for which in (0, 1):
    for pair in overlap(long, long):
        pair[which].stop()
        try:
            pair[which].wait(60)
        except EngineError:
            pass
        break
    pair[1 - which].wait(60)
    same(before, state())
"""


def test_overlapping_runs_leave_the_process_as_it_was(tiny: ModelConfig) -> None:
    """Whichever begins first, ends first or is stopped."""
    done = python(OVERLAPPING, tiny.path)
    assert not done.returncode, done.stderr


ENDING = """
import time
import workbench as wb
from tests.live.world import requests, scenario
from workbench.schedules import VSLPipe

case = scenario(wb.checkpoint(sys.argv[1]), requests([64, 90, 30, 120] * 40, 300), tokens=1 << 17)
run = wb.start(case, VSLPipe())
if sys.argv[2] != "loading":
    while run.progress.iterations < 2 and not run.state.ended:
        time.sleep(0.01)
if sys.argv[2] == "paused":
    run.pause()
if sys.argv[2] == "two":
    other = wb.start(case, VSLPipe(), alongside=True)
if sys.argv[2] == "in a thread":
    run.stop()
    threading.Thread(target=lambda: wb.run(case, VSLPipe()), daemon=True).start()
    time.sleep(0.5)
assert sys.argv[2] == "in a thread" or not run.state.ended, run.state
if sys.argv[2] == "error":
    raise SystemExit(7)
"""


@pytest.mark.parametrize("when", ["loading", "serving", "paused", "two", "in a thread", "error"])
def test_python_may_end_while_a_run_goes_on(when: str, tiny: ModelConfig) -> None:
    done = python(ENDING, tiny.path, when)
    assert done.returncode == (7 if when == "error" else 0), done.stderr


FORKING = """
import workbench as wb
from tests.live.world import requests, scenario
from workbench.schedules import VSLPipe

case = scenario(wb.checkpoint(sys.argv[1]), requests([64, 90, 30, 120] * 40, 300), tokens=1 << 17)
run = wb.start(case, VSLPipe())
child = os.fork()
if not child:
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_ends_although_its_parent_runs_live(tiny: ModelConfig) -> None:
    done = python(FORKING, tiny.path)
    assert not done.returncode, done.stderr


# ------------------------------------------------------------------------------------------------ one at a time


@pytest.mark.usefixtures(slow.__name__)
@pytest.mark.parametrize(
    "read", [wb.run, wb.start, lambda case, _: wb.calibrate(case.model)], ids=["run", "start", "c"]
)
def test_a_second_run_is_refused_while_one_goes_on(read, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wb.Machine, "local", classmethod(lambda cls, **_: scenario(tiny, ASKED).machine))
    first = wb.start(scenario(tiny, LASTING), VSLPipe())
    words = f"a live run of VSLPipe on {tiny.name!r} goes on .* wait for it, or stop it .* alongside=True"
    with pytest.raises(EngineError, match=words):
        read(scenario(tiny, ASKED), Sequential())
    assert not first.state.ended
    first.stop()
    until(lambda: first.state.ended)


@pytest.mark.usefixtures(slow.__name__)
def test_a_second_run_may_be_asked_for(tiny: ModelConfig) -> None:
    first = wb.start(scenario(tiny, LASTING), VSLPipe())
    alone = wb.run(scenario(tiny, ASKED), Sequential(), alongside=True)
    assert not first.state.ended
    first.stop()
    until(lambda: first.state.ended)
    assert alone.tokens == wb.run(scenario(tiny, ASKED), Sequential()).tokens


@pytest.mark.usefixtures(slow.__name__)
def test_a_run_that_was_stopped_is_waited_for(tiny: ModelConfig) -> None:
    first = wb.start(scenario(tiny, LASTING), VSLPipe())
    until(lambda: first.progress.emitted > 0)
    first.stop()
    assert wb.run(scenario(tiny, ASKED), Sequential()).tokens
    assert first.state is RunState.STOPPED


def test_the_next_run_begins_after_one_that_failed(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.engine import engine

    with monkeypatch.context() as patch:
        patch.setattr(engine.Forward, "warm_up", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            wb.run(scenario(tiny, ASKED), Sequential())
        failed = wb.start(scenario(tiny, ASKED), Sequential())
        with pytest.raises(ZeroDivisionError):
            failed.wait(30)
    assert wb.run(scenario(tiny, ASKED), Sequential()).tokens
