"""Points that other processes read: whoever is killed, each is read once and nothing is lost."""

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, deque
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.builders import OWN
from tests.examples import examples
from tests.sweeping import OVER, SCENARIO, Deadly, on_processes_at_once, sweep_to
from workbench.analysis.sweeps import running
from workbench.analysis.sweeps.pools import Brought, Embedded
from workbench.analysis.sweeps.reading import Base, Row, Rows
from workbench.analysis.sweeps.running import TRIES, Task, read_all
from workbench.core.errors import SweepError
from workbench.pipeline import gpu
from workbench.schedules import Sequential, VSLPipe
from workbench.stages import Op, attention, moe, out_proj, qkv

BASE = Base(SCENARIO, VSLPipe(), wb.bound)
ROOT = Path(__file__).parents[2]


def plain(sweep):
    return sweep.dataset.drop_attrs()


# ------------------------------------------------------------------------------------- a pool whose processes are told


class Told:
    """A pool that reads at once or loses everything that it was handed, as it is told."""

    window = 4

    def __init__(self, poisonous=(), loses=(), fails=()):
        self.poisonous = poisonous
        self.loses = deque(loses)
        self.fails = fails
        self.handed = []
        self.begun = Counter()
        self.most = 0
        self.renewed = 0
        self.stopped = False

    def submit(self, call, base, chunk):
        points = [values["n"] for values in chunk]
        self.begun.update(points)
        future = Future()
        self.handed.append((future, points))
        live = [each for each in self.handed if not each[0].done()]
        self.most = max(self.most, len(live))
        killed = set(points) & set(self.poisonous) or (self.loses and self.loses.popleft())
        if killed:
            for one, _ in live:
                one.set_exception(BrokenExecutor("killed"))
        elif set(points) & set(self.fails):
            future.set_exception(ValueError("cannot be sent"))
        else:
            future.set_result(Rows([Row({"gen_tok_s": float(n)}) for n in points], 0.1 * len(points)))
        return future

    def renew(self):
        self.renewed += 1

    def stop(self):
        self.stopped = True


def feed(pool, count, pace=0.1):
    """Everything that is collected for so many points."""
    got = []
    tasks = deque(Task((n,), {"n": n}) for n in range(count))
    running._Feeder(BASE, tasks, pool, got.extend, pace).run()
    return got


@given(
    count=st.integers(0, 40),
    poisonous=st.sets(st.integers(0, 39), max_size=3),
    loses=st.lists(st.booleans(), max_size=12),
    fails=st.sets(st.integers(0, 39), max_size=3),
    pace=st.floats(1e-4, 1),
)
@examples(300)
def test_each_point_is_collected_once_whoever_is_killed(count, poisonous, loses, fails, pace):
    pool = Told(poisonous, loses, fails)
    got = feed(pool, count, pace)
    assert sorted(place for place, _ in got) == [(n,) for n in range(count)]
    for (n,), row in got:
        if n in poisonous | fails:
            assert row.problem.startswith(f"set aside after {TRIES} tries")
            assert not row.lasting
        elif not any(loses):
            assert row == Row({"gen_tok_s": float(n)})
    assert max(pool.begun.values(), default=0) <= TRIES
    assert pool.most <= pool.window


def test_only_the_guilty_point_is_set_aside():
    pool = Told(poisonous=[7])
    got = dict(feed(pool, 20))
    assert [place for place, row in got.items() if row.problem] == [(7,)]
    assert got[7,].problem == "set aside after 3 tries: the process that read it was killed each time."
    assert pool.begun[7] == TRIES
    assert pool.renewed == TRIES


def test_points_that_could_be_guilty_are_read_alone():
    pool = Told(loses=[False, False, True])
    feed(pool, 20, pace=1.0)
    broken = [points for future, points in pool.handed if future.exception() is not None]
    (suspect,) = broken[0]
    again = [number for number, (_, points) in enumerate(pool.handed) if points == [suspect]]
    assert len(again) == 2


def test_a_suspect_waits_until_nothing_else_is_being_read():
    one, other, suspect = (Task((n,), {"n": n}) for n in range(3))
    feeder = running._Feeder(BASE, deque([one]), Told(), list, 1.0)
    feeder._suspects.append(suspect)
    feeder._handed[Future()] = [other]
    assert feeder._next() == []
    feeder._handed.clear()
    assert feeder._next() == [suspect]
    assert feeder._next() == [one]


def test_an_interrupt_stops_the_pool_and_keeps_what_was_read():
    pool = Told()
    got = []

    def interrupted(rows):
        got.extend(rows)
        if len(got) >= 3 and not pool.stopped:
            raise KeyboardInterrupt

    tasks = deque(Task((n,), {"n": n}) for n in range(10))
    with pytest.raises(KeyboardInterrupt):
        running._Feeder(BASE, tasks, pool, interrupted, 1.0).run()
    assert pool.stopped
    kept = {place for place, _ in got}
    finished = {(n,) for future, points in pool.handed for n in points if future.done()}
    assert kept == finished


# --------------------------------------------------------------------------------------------------- where it is read


def where(monkeypatch, base, count, *, pace, cores=2):
    """The kind of pool that points are read on, by the time that one takes."""
    used = []

    class Fake(Told):
        def __init__(self, workers):
            super().__init__()
            assert workers == min(cores, count)
            used.append("processes")

        def submit(self, call, base, chunk):
            future = Future()
            future.set_result(Rows([Row({})] * len(chunk), pace))
            return future

        def close(self):
            pass

    clock = [0.0]

    def read(base, chunk):
        clock[0] += pace
        return Rows([Row({})], pace)

    monkeypatch.setattr(running, "Embedded", Fake)
    monkeypatch.setattr(running, "usable_cores", lambda: cores)
    monkeypatch.setattr(running, "read_chunk", read)
    monkeypatch.setattr(running.time, "perf_counter", lambda: clock[0])
    got = []
    read_all(base, [Task((n,), {}) for n in range(count)], None, got.extend)
    assert sorted(place for place, _ in got) == [(n,) for n in range(count)]
    return used


def test_few_or_quick_points_are_read_in_this_process(monkeypatch):
    assert where(monkeypatch, BASE, 1000, pace=0.005) == []
    assert where(monkeypatch, BASE, 3, pace=3.0) == []
    assert where(monkeypatch, BASE, 1000, pace=0.1) == ["processes"]
    assert where(monkeypatch, BASE, 1000, pace=0.1, cores=1) == []


def test_what_processes_cannot_be_sent_is_read_here_and_told(monkeypatch):
    mine = Op("mine", ("x",), ("x",), work=lambda rows, model, precision: OWN.work(rows, model, precision))
    own = Base(SCENARIO.on(pipeline=gpu(mine, qkv, attention, out_proj, moe)), Sequential(), wb.bound)
    with pytest.warns(
        RuntimeWarning, match="cannot be sent to other processes .* so all points are read in this process"
    ):
        assert where(monkeypatch, own, 100, pace=1.0) == []


def test_a_run_is_never_sent_to_processes(monkeypatch):
    def run(scenario, schedule):
        raise NotImplementedError

    run.__module__ = "workbench.engine.engine"
    assert where(monkeypatch, Base(SCENARIO, VSLPipe(), run), 100, pace=1.0) == []


def test_any_executor_reads(tmp_path):
    with ThreadPoolExecutor(2) as executor:
        threads = wb.sweep(
            SCENARIO, over={**OVER, "workload.requests": [1, 2, 3]}, executor=executor, store=tmp_path / "a"
        )
    here = wb.sweep(SCENARIO, over={**OVER, "workload.requests": [1, 2, 3]}, store=tmp_path / "b")
    assert plain(threads).identical(plain(here))


def test_a_broken_executor_of_the_user_is_told():
    with pytest.raises(SweepError, match="Told is broken: one of its processes was killed; make another one"):
        feed(Brought(Told(loses=[True])), 3)


# ------------------------------------------------------------------------------------------------- processes and kills


@pytest.fixture
def two_processes(monkeypatch):
    for name in ("PROBE", "WORTH", "usable_cores"):
        monkeypatch.setattr(running, name, getattr(running, name))
    on_processes_at_once()


@pytest.mark.slow
def test_a_killed_worker_loses_nothing_and_is_not_waited_for(two_processes, tmp_path):
    log = tmp_path / "log"
    over = {"workload.requests": tuple(range(1, 41)), "schedule": OVER["schedule"]}
    sweep = wb.sweep(SCENARIO, over=over, read=Deadly(20, log, tmp_path / "mark"), store=tmp_path / "a")
    assert (tmp_path / "mark").exists()
    undisturbed = wb.sweep(SCENARIO, over=over, read=wb.bound, store=tmp_path / "b")
    assert plain(sweep).identical(plain(undisturbed))
    read = [line.rsplit(maxsplit=1) for line in log.read_text().splitlines()]
    assert {point for point, _ in read} == {
        f"{n} {s.name}" for n in over["workload.requests"] for s in OVER["schedule"]
    }
    assert len({process for _, process in read} - {str(os.getpid())}) >= 2  # the killed one, and who read on
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_point_that_kills_each_time_is_named_and_the_others_stand(two_processes, tmp_path):
    over = {"workload.requests": tuple(range(1, 31))}
    sweep = wb.sweep(SCENARIO, VSLPipe(), over=over, read=Deadly(20, tmp_path / "log"), store=tmp_path / "a")
    (aside,) = sweep.problems
    assert aside.labels == {"requests": 20}
    assert aside.problem == "set aside after 3 tries: the process that read it was killed each time."


def committed(store):
    """Number of readings on disk."""
    try:
        with sqlite3.connect(store) as file:
            return file.execute("SELECT COUNT(*) FROM readings").fetchone()[0]
    except sqlite3.Error:
        return 0


def stopped_midway(store, how, kind):
    """The readings on disk after a sweep was stopped with a signal; none of its processes is left."""
    command = [sys.executable, "-m", "tests.sweeping", str(store), kind]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    while committed(store) < 20:
        assert other.poll() is None, other.stderr.read()
        time.sleep(0.02)
    family = psutil.Process(other.pid).children(recursive=True)
    other.send_signal(how)
    _, told = other.communicate(timeout=60)
    assert ("KeyboardInterrupt" in told) == (how == signal.SIGINT), told
    _, left = psutil.wait_procs(family, timeout=20)
    assert not left
    assert (kind == "processes") == bool(family)
    return committed(store)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["here", "processes"])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_goes_on_where_it_was(how, kind, tmp_path, monkeypatch):
    store = tmp_path / "readings.sqlite"
    before = stopped_midway(store, how, kind)
    total = len(OVER["workload.requests"]) * len(OVER["schedule"])
    assert 20 <= before < total
    read = []
    chunk = running.read_chunk
    monkeypatch.setattr(running, "read_chunk", lambda base, values: (read.extend(values), chunk(base, values))[1])
    monkeypatch.setattr(running, "WORTH", float("inf"))
    resumed = sweep_to(store)
    assert len(read) == total - before
    assert committed(store) == total
    assert plain(resumed).identical(plain(sweep_to(tmp_path / "undisturbed.sqlite")))


@pytest.mark.slow
def test_a_script_without_a_guard_is_read_in_its_own_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from tests.sweeping import SCENARIO, VSLPipe, on_processes_at_once, wb\n"
        "on_processes_at_once()\n"
        f"over, store = {{'workload.requests': (1, 2, 3, 4)}}, {str(tmp_path / 's')!r}\n"
        "found = wb.sweep(SCENARIO, VSLPipe(), over=over, store=store)\n"
        "print(len(found.points))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "4\n"
    assert "no process can be started" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr


@pytest.mark.slow
def test_the_pool_begins_anew_after_a_kill():
    pool = Embedded(2)
    first = pool.submit(os.getpid).result()
    os.kill(first, signal.SIGKILL)
    with pytest.raises(BrokenExecutor):
        pool.submit(time.sleep, 60).result()
    pool.renew()
    assert pool.submit(os.getpid).result() != first
    pool.stop()
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_dask_with_a_killed_worker_gives_the_same(tmp_path):
    pytest.importorskip("distributed")
    pytest.importorskip("cryptography")
    from workbench.analysis.sweeps.local_dask import local_dask

    log = tmp_path / "log"
    over = {"workload.requests": tuple(range(1, 61))}
    with local_dask(workers=2) as executor:
        me = psutil.Process()
        listening = [
            each.laddr.ip
            for process in (me, *me.children(recursive=True))
            for each in process.net_connections("inet")
            if each.status == psutil.CONN_LISTEN
        ]
        read = Deadly(30, log, tmp_path / "mark")
        sweep = wb.sweep(SCENARIO, VSLPipe(), over=over, read=read, executor=executor, store=tmp_path / "a")
    assert (tmp_path / "mark").exists()
    assert set(listening) == {"127.0.0.1"}
    assert len(listening) >= 4
    assert plain(sweep).identical(plain(wb.sweep(SCENARIO, VSLPipe(), over=over, read=wb.bound, store=tmp_path / "b")))
    assert len({line.split()[-1] for line in log.read_text().splitlines()}) >= 2


def test_dask_is_named_where_it_is_missing(monkeypatch):
    from workbench.analysis.sweeps.local_dask import local_dask

    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(SweepError, match=r"pip install 'moe-workbench\[dask\]'"), local_dask():
        pass
