"""The compiled simulator gives what Python gives, bit by bit; it is imported late, and is not needed."""

import cProfile
import importlib
import math
import os
import pstats
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import scenarios, streaming, tiny_model_of, tiny_scenario
from tests.examples import examples
from tests.systems import PIPELINES
from workbench.bench.simulator import job
from workbench.pipeline.layer_graph import Node, NodeKind
from workbench.scenario import Memory
from workbench.scheduler.continuous import ContinuousBatching
from workbench.scheduler.registry import every_scheduler
from workbench.scheduler.resource_aware import Admission, ResourceAware
from workbench.schedules import Sequential, VSLPipe
from workbench.schedules.plan import LANES, Task, Turns, places_before, play
from workbench.simulate import Detail, clock, late_bar, simulate
from workbench.simulate.kernels import filling
from workbench.simulate.kernels.order import Order
from workbench.simulate.laying import Laying
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
    order = tuple(Order.of(turns))
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
    """Two results are the same: every iteration, span, latency of a request, and total, bit by bit."""
    assert one.steps == other.steps
    assert list(map(repr, one.timeline)) == list(map(repr, other.timeline))
    for name in ("seconds", "busy", "latencies", "ttft", "tbt", "energy", "preemptions", "recomputed", "facts"):
        assert repr(getattr(one, name)) == repr(getattr(other, name)), name


@examples(200)
@given(scenarios(layers=st.integers(1, 24)) | streaming(layers=st.integers(1, 16)), st.sampled_from(Detail))
def test_a_scenario_gives_the_identical_result_in_python(kernels, case, detail):
    """With what the laws draw: stacks, kinds of layers, every schedule and scheduler, limits, arrivals, preemptions.

    The kernels lay out the plans of each scenario whose lanes share no cores. Whole iterations they make only under
    `ResourceAware` and `ContinuousBatching`, where the rows of a batch are the same at every layer.
    """
    with pytest.MonkeyPatch.context() as patched:
        by_python = in_python(patched, lambda: simulate(*case, detail=detail))
    alike(by_python, simulate(*case, detail=detail))


KERNELS_TAKE = {
    "plain": {"layouts", "stretches"},
    "windows": {"layouts"},
    "states": {"layouts"},
    "sparse": {"layouts"},
}
"""What the kernels do for a model of each kind under `ResourceAware`."""


@pytest.mark.parametrize("kind", KERNELS_TAKE)
@pytest.mark.parametrize("scheduler", every_scheduler(), ids=repr)
def test_what_is_compared_is_compiled(kernels, monkeypatch, kind, scheduler):
    """So that a comparison does not compare Python with itself."""
    done = set[str]()
    for name, what in (("lay_out", "layouts"), ("advance", "stretches")):
        method = getattr(Laying, name)
        monkeypatch.setattr(Laying, name, lambda *given, of=method, said=what: (done.add(said), of(*given))[1])
    scenario = tiny_scenario(
        [9, 5, 7] * 6, [6, 9, 4] * 6, model=tiny_model_of(kind), pipeline=PIPELINES["all_gpu"], scheduler=scheduler
    )
    simulate(scenario, Sequential())
    whole = isinstance(scheduler, ResourceAware | ContinuousBatching)
    assert done == KERNELS_TAKE[kind] - (set() if whole else {"stretches"})


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


class Stub:
    """What a loader imports, with machine code on disk or not, and a process that ends as told instead of compiling."""

    def __init__(self, monkeypatch, *, kept, folder="there", command="exit 0"):
        self.imported, self.processes, self.loads = list[str](), list[int](), 0
        self.command = command
        self.COMPILED = SimpleNamespace(kept=kept, folder=folder, load=self.compile)
        self.lay_out = self.advance = len
        self.config = SimpleNamespace(DISABLE_JIT=0)
        monkeypatch.setattr("importlib.import_module", self.note)

    def note(self, name):
        self.imported.append(name.rpartition(".")[2])
        return self

    def compile(self):
        self.loads += 1

    def begin(self):
        self.processes.append(os.posix_spawn("/bin/sh", ["sh", "-c", self.command], {}))
        return self.processes[-1]


def asked(late, times):
    """Ask a loader so often, and wait until its threads have nothing more to do."""
    for _ in range(times):
        late.kernels()
    late._join()
    for thread in threading.enumerate():
        if thread.name == "waiting for the simulator":
            thread.join()


def test_a_short_simulation_imports_no_kernels(monkeypatch):
    stub, late = Stub(monkeypatch, kept=True), Loader()
    asked(late, PATIENCE)
    assert not stub.imported
    asked(late, 1)
    assert late.kernels() is not None
    assert (stub.imported, stub.loads, stub.processes) == (["numba", "entries"], 1, [])


def test_another_process_compiles_what_is_not_on_disk(monkeypatch):
    stub, late = Stub(monkeypatch, kept=False), Loader()
    asked(late, PATIENCE + 1)
    assert (stub.loads, len(stub.processes)) == (0, 1)
    asked(late, 1)
    assert late.kernels() is not None
    assert (stub.loads, len(stub.processes)) == (1, 1)
    with pytest.raises(ChildProcessError):
        os.waitpid(stub.processes[0], 0)  # it has been waited for


@pytest.mark.parametrize("command", ["exit 1", "kill -9 $$"])
def test_where_compiling_fails_python_goes_on(monkeypatch, command):
    stub, late = Stub(monkeypatch, kept=False, command=command), Loader()
    for _ in range(4):
        asked(late, PATIENCE + 1)
    assert late.kernels() is None
    assert (stub.loads, len(stub.processes)) == (0, 1)


def test_what_another_process_has_compiled_is_loaded_though_ours_was_ended(monkeypatch):
    stub, late = Stub(monkeypatch, kept=False, command="kill -9 $$"), Loader()
    asked(late, PATIENCE + 1)
    stub.COMPILED.kept = True
    asked(late, 1)
    assert late.kernels() is not None


def test_where_nothing_can_be_kept_a_thread_compiles(monkeypatch):
    stub, late = Stub(monkeypatch, kept=False, folder=None), Loader()
    asked(late, PATIENCE + 1)
    assert late.kernels() is not None
    assert (stub.loads, stub.processes) == (1, [])


def test_a_forked_process_begins_anew(monkeypatch):
    stub, late = Stub(monkeypatch, kept=False), Loader()
    asked(late, PATIENCE + 1)
    late._forget()
    asked(late, PATIENCE + 1)
    assert len(stub.processes) == 2


def test_machine_code_on_disk_is_found_and_not_compiled_again(kernels, capfd):
    """By a process of its own as well, which says nothing and ends at once."""
    entries = importlib.import_module("workbench.simulate.kernels.entries")
    assert entries.COMPILED.kept
    hits = "sum(kernel.stats.cache_hits.total() for kernel in (entries.lay_out, entries.advance))"
    load = "import sys; from workbench.simulate.kernels import entries; entries.COMPILED.load()"
    code = f"{load}; print({hits}, 'numba.np.arraymath' in sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["2", "False"]
    begin = time.perf_counter()
    assert os.waitpid(filling.begin(), 0)[1] == 0
    assert time.perf_counter() - begin < 60
    assert capfd.readouterr() == ("", "")


def test_an_edit_of_any_kernel_makes_old_machine_code_worthless(kernels, monkeypatch):
    compiling = importlib.import_module("workbench.simulate.kernels.compiling")
    entries = importlib.import_module("workbench.simulate.kernels.entries")
    (_, signature), *_ = entries.COMPILED._kernels
    found = compiling._Cache(entries.lay_out.py_func)
    assert found.has(signature, entries.lay_out.targetctx)
    monkeypatch.setattr(compiling, "_SOURCES", "edited")
    assert not compiling._Cache(entries.lay_out.py_func).has(signature, entries.lay_out.targetctx)


def test_without_numba_the_simulation_goes_on_in_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert Loader().load() is None


def test_a_function_that_numba_may_not_compile_is_left_to_python(monkeypatch):
    from numba import config

    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    assert Loader().load() is None
