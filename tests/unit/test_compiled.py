"""The compiled simulator gives what Python gives, bit by bit; it is imported late, and is not needed."""

import cProfile
import math
import pstats
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import scenarios
from tests.examples import examples
from workbench.bench.simulator import job
from workbench.pipeline.layer_graph import Node, NodeKind
from workbench.scenario import Memory
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.resource_aware import Admission, ResourceAware
from workbench.schedules import VSLPipe
from workbench.schedules.plan import LANES, Task, Turns, places_before, play
from workbench.simulate import Detail, clock, late_bar, simulate
from workbench.simulate.loading import PATIENCE, Loader, loader
from workbench.simulate.tapes import UntraceableError, record
from workbench.workload import Workload

CALLS_PER_ITERATION = 130  # 102 when this was written; 713 in Python
NODES = {lane: Node(NodeKind.SEGMENT, "A", lane) for lane in LANES}


@pytest.fixture(scope="module")
def kernels():
    found = loader().load()
    assert found is not None
    return found


class Nothing:
    """A loader without kernels."""

    def kernels(self):
        return None


def in_python(monkeypatch, read):
    """What `read` gives without the kernels."""
    with monkeypatch.context() as patched:
        patched.setattr(clock, "loader", Nothing)
        return read()


# ------------------------------------------------------------------------------------------------------ playing a plan


@st.composite
def plans(draw):
    """Tasks, groups, and seconds and slowdowns of the groups: some tasks alone, then a pattern several times over."""
    length = draw(st.integers(1, 6))
    times = draw(st.integers(1, 9))
    before = draw(st.integers(0, 4))
    after = draw(st.integers(0, 4))
    kinds = st.tuples(st.sampled_from(LANES), st.booleans(), st.sets(st.integers(1, 8), max_size=3))
    pattern = draw(st.lists(kinds, min_size=length, max_size=length))
    others = draw(st.lists(kinds, min_size=before + after, max_size=before + after))
    tasks = list[Task]()
    groups = list[int]()
    numbered = [*enumerate(others[:before], length), *list(enumerate(pattern)) * times]
    for number, (lane, bulk, distances) in [*numbered, *enumerate(others[before:], length + before)]:
        waits = tuple(sorted({len(tasks) - far for far in distances if far <= len(tasks)}))
        tasks.append(Task(NODES[lane], 0, 0, waits, bulk=bulk))
        groups.append(number)
    renumbered = {group: place for place, group in enumerate(sorted(set(groups)))}
    groups = [renumbered[group] for group in groups]
    count = len(renumbered)
    seconds = draw(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 1e-4, 7.7]), min_size=count, max_size=count))
    slowdowns = draw(st.lists(st.sampled_from([0.0, 0.2, 0.5]), min_size=count, max_size=count))
    return tasks, groups, seconds, slowdowns


@examples(400)
@given(plans(), st.sampled_from([float("inf"), 0.07, 1e-3, 2.0]), st.booleans())
def test_a_plan_is_played_as_in_python(kernels, plan, packet, skip):
    tasks, groups, seconds, slowdowns = plan
    turns = Turns.of(tasks, groups)
    by_python = play(turns, seconds, packet, slowdowns, skip=skip)
    starts, ends = np.empty((2, len(tasks)))
    busy, told = np.empty(len(LANES)), np.empty(3)
    before = np.zeros(len(tasks), dtype=np.int64)
    table = np.full((len(seconds), 3), -1, dtype=np.int64)
    table[:, 2] = 0
    prices = np.array([seconds, [0.0] * len(seconds), slowdowns]).T.copy()
    none = np.zeros(0, dtype=np.int64)
    tapes = (np.zeros((0, 4), dtype=np.int64), np.zeros(0), np.zeros((1, 9), dtype=np.int64), none)
    order = tuple(kernels.Order.of(turns))
    given_rows = np.zeros(8)
    kernels.lay_out(
        order, tapes, none, table, none, given_rows, prices, 0.0, 1.0, packet, skip, starts, ends, busy, told, before
    )
    assert ends.tolist() == by_python.ends
    assert starts.tolist() == by_python.starts
    assert dict(zip(LANES, busy.tolist(), strict=True)) == by_python.busy
    assert told[1] == max(by_python.ends)
    if not skip:
        assert before.tolist() == places_before(tasks, *by_python[:2])


# ------------------------------------------------------------------------------------------------------ whole scenarios


def alike(one, other):
    """Two results, every number and span of them, are the same."""
    assert one.steps == other.steps
    assert list(map(repr, one.timeline)) == list(map(repr, other.timeline))
    for name in ("seconds", "busy", "latencies", "ttft", "tbt", "energy", "preemptions", "recomputed", "facts"):
        assert repr(getattr(one, name)) == repr(getattr(other, name)), name


@examples(200)
@given(scenarios(layers=st.integers(1, 24)), st.sampled_from(Detail))
def test_a_scenario_gives_the_identical_result_in_python(kernels, case, detail):
    with pytest.MonkeyPatch.context() as patched:
        by_python = in_python(patched, lambda: simulate(*case, detail=detail))
    alike(by_python, simulate(*case, detail=detail))


def test_a_large_job_gives_the_identical_result_in_python(kernels, monkeypatch):
    by_python = in_python(monkeypatch, lambda: simulate(job(32), VSLPipe()))
    compiled = simulate(job(32), VSLPipe())
    alike(by_python, compiled)
    assert len(set(compiled.steps.decode)) > 50


def test_a_large_job_takes_few_calls(kernels, monkeypatch):
    monkeypatch.setattr(late_bar, "DELAY", math.inf)
    scenario = job()
    profile = cProfile.Profile()
    result = profile.runcall(simulate, scenario, VSLPipe())
    assert pstats.Stats(profile).total_calls < CALLS_PER_ITERATION * result.iterations


@pytest.mark.parametrize(
    "scheduler",
    [
        ContinuousBatching(),
        ContinuousBatching(max_running=7),
        ResourceAware(admission=Admission.PACED),
        ResourceAware(max_running=7),
    ],
    ids=repr,
)
@pytest.mark.parametrize("rate", [None, 0.5, 50.0])
def test_requests_that_arrive_and_schedulers_give_the_identical_result_in_python(kernels, monkeypatch, scheduler, rate):
    workload = Workload.lengths([5, 90, 33, 260] * 60, [40, 3, 1, 25] * 60)
    if rate is not None:
        workload = workload.arriving(rate=rate, seed=1)
    scenario = replace(job(), workload=workload, memory=Memory(kv_capacity="3GB", kv_block=16), scheduler=scheduler)
    by_python = in_python(monkeypatch, lambda: simulate(scenario, VSLPipe()))
    alike(by_python, simulate(scenario, VSLPipe()))


# --------------------------------------------------------------------------------------------------------------- tapes


def test_a_tape_has_the_steps_of_a_function_and_the_answers_that_it_took():
    tape = record(lambda counts: (2.0 * counts[0] + counts[1] if counts[0] > 1 else 0.0,), [3, 4])
    assert tape.inputs == 2
    assert len(tape.steps) == 3
    assert record(lambda counts: (2.0 * counts[0] if counts[0] > 1 else 0.0,), [1]).steps != tape.steps


@pytest.mark.parametrize(
    "function",
    [
        lambda n: (float(n[0]),),
        lambda n: (n[0] // 2,),
        lambda n: (round(n[0]),),
        lambda n: (np.log(n[0]),),
        lambda n: (np.float64(2) * n[0],),
        lambda n: (1.0 if n[0] == 3 else 2.0,),
        lambda n: (range(5)[n[0]],),
        lambda n: (n[0] * 2**60,),
        lambda n: (n[0] * 2**52,),
        lambda n: (n[0] ** 2,),
    ],
)
def test_what_no_tape_repeats_is_refused(function):
    with pytest.raises((UntraceableError, TypeError)):
        record(function, [3])


# ------------------------------------------------------------------------------------------------------------- loading


def test_a_short_simulation_imports_no_kernels(monkeypatch):
    imported = list[str]()

    def note(name):
        imported.append(name)
        return SimpleNamespace(config=SimpleNamespace(DISABLE_JIT=0))

    monkeypatch.setattr("importlib.import_module", note)
    late = Loader()
    for _ in range(PATIENCE):
        assert late.kernels() is None
    assert not imported
    late.kernels()
    late.load()
    assert imported == ["numba", "workbench.simulate.compiled"]


def test_without_numba_the_simulation_goes_on_in_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert Loader().load() is None


def test_a_function_that_numba_may_not_compile_is_left_to_python(monkeypatch):
    from numba import config

    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    assert Loader().load() is None
