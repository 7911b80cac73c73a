"""Calls that several threads compute together: who takes part, and that nobody is left inside."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kernels_cpu.codegen.compiled import compiled
from kernels_cpu.threads import pull as pulls
from kernels_cpu.threads import team as team_module
from kernels_cpu.threads.entries import entries_of
from kernels_cpu.threads.pull import pull
from kernels_cpu.threads.task_counts import fetch_add, next_task, peek, tasks_done
from kernels_cpu.threads.waiting import pause

LOOKS = 100_000_000
"""Looks for another thread, many seconds: a law that fails ends."""

natively = pytest.mark.skipif(not pulls.SLEEPS, reason="helpers come through Python here")


@compiled()
def doubled(counter, numbers, twice):
    """One number per task."""
    at = next_task(counter)
    while at < len(numbers):
        twice[at] += 2 * numbers[at]
        at = next_task(counter)


@compiled()
def met(counter, threads, seen):
    """Stay until so many threads are inside, and count those that saw it."""
    next_task(counter)
    looks = 0
    while peek(counter) < threads and looks < LOOKS:
        pause(looks)
        looks += 1
    if peek(counter) >= threads:
        fetch_add(seen.ctypes.data, 1)


@compiled()
def left_to_the_second(counter, out):
    """The first thread leaves all to the second, which takes its time."""
    looks = 0
    if next_task(counter) == 0:
        while peek(counter) < 2 and looks < LOOKS:
            pause(looks)
            looks += 1
        return
    while looks < 100_000:
        pause(looks)
        looks += 1
    out[0] += 1


@pytest.fixture(params=["asleep in compiled code", "of a pool"])
def helpers(request, monkeypatch):
    """Both kinds of helpers. Code that is compiled wakes those that sleep, of which there are none in a new team."""
    if request.param == "of a pool":
        monkeypatch.setattr(pulls, "SLEEPS", False)
        monkeypatch.setattr(pulls, "_free_teams", lambda process, cpus, free=[]: free)
        monkeypatch.setattr(pulls, "_compile", lambda: None)
    elif not pulls.SLEEPS:
        pytest.skip("compiled code cannot sleep here")


def test_many_calls_from_several_threads_at_once(helpers):
    """Of different types and with different numbers of helpers."""
    wrong = []

    def many(seed):
        random = np.random.default_rng(seed)
        for turn in range(300):
            numbers = random.integers(0, 99, int(random.integers(1, 40))).astype(random.choice([np.float32, np.int64]))
            twice = np.zeros_like(numbers)
            pull(doubled, (numbers, twice), int(random.integers(1, 6)))
            if not np.array_equal(twice, 2 * numbers):
                wrong.append((seed, turn))

    callers = [threading.Thread(target=many, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


@natively
def test_a_call_ends_when_the_other_thread_has_done_its_task():
    for _ in range(20):
        out = np.zeros(1)
        pull(left_to_the_second, (out,), 2)
        assert out[0] == 1


@natively
def test_as_many_threads_take_part_as_are_asked(monkeypatch):
    monkeypatch.setattr(pulls, "_free_teams", lambda process, cpus, free=[]: free)
    monkeypatch.setattr(pulls, "helping_cpus", lambda: frozenset(range(4)))
    monkeypatch.setattr(pulls, "pin", lambda cpus: None)
    for threads in (3, 8, 2, 6, 1):  # more than the first helpers wake, and fewer than have started
        seen = np.zeros(1, np.int64)
        pull(met, (threads, seen), threads)
        assert seen[0] == threads


compute = pulls._compute


@compiled()
def met_later(flags, board, known, threads, seen):
    """Make a call of two threads when another thread has Python to itself."""
    flags[0] = 1
    looks = 0
    while peek(flags.ctypes.data + 8) == 0 and looks < LOOKS:
        pause(looks)
        looks += 1
    compute(board, threads - 1, known, threads, seen)


@natively
def test_helpers_come_while_another_thread_keeps_python_to_itself():
    team = pulls._Team(frozenset({0, 1}))
    seen = np.zeros(1, np.int64)
    team.compute(met, (2, seen), 2)
    assert seen[0] == 2  # the helper is there
    known = entries_of(met).known
    flags = np.zeros(2, np.int64)
    met_later.compile(tuple(map(met_later.typeof_pyval, (flags, team._address, known, 2, seen))))
    seen_by_python = []

    def busy():
        while flags[0] == 0:
            time.sleep(1e-4)
        ended = time.monotonic() + 20
        flags[1] = 1
        while seen[0] < 4 and time.monotonic() < ended:
            pass
        seen_by_python.append(int(seen[0]))

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=busy)
    thread.start()
    try:
        sys.setswitchinterval(60)
        met_later(flags, team._address, known, 2, seen)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert seen_by_python == [4]


def test_a_helper_that_comes_late_does_nothing():
    seen = np.zeros(1, np.int64)
    team = pulls._Team(frozenset({0, 1}))
    team.compute(met, (2, seen), 2)
    ended = int(team._board[0]) - 1
    pulls._take_part(team._address, 0, ended)
    assert seen[0] == 2


def test_a_helper_that_a_call_has_not_asked_for_does_nothing():
    seen = np.zeros(1, np.int64)
    team = pulls._Team(frozenset({0, 1}))
    team.compute(met, (2, seen), 2)
    call = int(team._board[0]) + 1
    team._board[0] = call  # as if the next call, of two threads too, had begun
    pulls._take_part(team._address, 1, call)
    assert seen[0] == 2


@compiled()
def failing(counter, size, first_too):
    """Want more memory than there is, in every thread or in all but the first."""
    if next_task(counter) > 0 or first_too:
        np.empty(size)


@compiled()
def failing_in_a_phase(counter, size, first_fails, left):
    """Two threads come together; one wants more memory than there is, the other waits until its task is done."""
    first = next_task(counter) == 0
    looks = 0
    while peek(counter) < 2 and looks < LOOKS:
        pause(looks)
        looks += 1
    if first == first_fails:
        np.empty(size)
    looks = 0
    while tasks_done(counter, 1) < 1 and looks < LOOKS:
        pause(looks)
        looks += 1
    if looks < LOOKS:
        fetch_add(left.ctypes.data, 1)


@natively
@pytest.mark.parametrize("first_fails", [True, False])
def test_nobody_waits_for_the_task_of_a_thread_that_failed(first_fails):
    team = pulls._Team(frozenset({0, 1}))
    left = np.zeros(1, np.int64)
    with pytest.raises(MemoryError, match="for want of memory"):
        team.compute(failing_in_a_phase, (1 << 60, first_fails, left), 2)
    assert left[0] == 1
    seen = np.zeros(1, np.int64)
    team.compute(met, (2, seen), 2)
    assert seen[0] == 2


@pytest.mark.parametrize(("threads", "alone"), [(1, True), (2, False)], ids=["of the caller", "of a helper"])
def test_an_error_of_any_thread_is_raised(threads, alone):
    deadline = time.monotonic() + 60
    with pytest.raises(MemoryError, match="for want of memory"):  # noqa: PT012, until a helper comes in time
        while time.monotonic() < deadline:
            pull(failing, (1 << 60, alone), threads)


@pytest.mark.parametrize(
    ("own", "expected"), [({1, 2}, {1, 2}), ({1}, {0, 2, 3}), ({0, 1, 2, 3}, {0, 1, 2, 3})], ids=str
)
def test_helpers_have_the_callers_cpus_or_the_others_of_a_caller_that_has_one(own, expected, monkeypatch):
    monkeypatch.setattr(team_module, "usable_cpus", lambda: frozenset(own))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    assert team_module.helping_cpus() == expected


@natively
def test_helpers_stay_where_the_system_refuses_their_cpus():
    seen = np.zeros(1, np.int64)
    team = pulls._Team(frozenset({1 << 14}))
    team.compute(met, (2, seen), 2)
    assert seen[0] == 2


FORKED = """
import os
import numpy as np
from kernels_cpu import decode_attention

def compute(threads):
    q = np.random.default_rng(0).standard_normal((64, 8, 64), dtype=np.float32)
    kv = np.random.default_rng(1).standard_normal((4, 2, 2, 16, 64), dtype=np.float32)
    return decode_attention(q, kv, np.zeros((64, 4), np.int32), np.full(64, 50), threads=threads)

want = compute(1)
for _ in range(20):
    assert np.array_equal(compute(4), want)
child = os.fork()
for _ in range(20):
    assert np.array_equal(compute(4), want)
if child == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_computes_and_processes_end():
    found = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
