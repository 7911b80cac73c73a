"""Where lanes work: cores of their own beside each other, every core where one follows the other."""

import os
import sys
import threading

import pytest
import torch

from workbench.engine.lanes import affinity as affinity_module
from workbench.engine.lanes.affinity import Affinity, affinities, name_thread, pin
from workbench.hardware.profile import Cores, Pace

linux = pytest.mark.skipif(sys.platform != "linux", reason="cores are chosen on Linux only")


@pytest.fixture
def computer(monkeypatch):
    def of(cores: int):
        monkeypatch.setattr(affinity_module.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        return Cores.of(cores)

    return of


@pytest.mark.parametrize(("beside", "movers"), [("gpu", (0,)), ("cpu", (1,))])
def test_on_two_cores_the_movers_share_the_core_that_the_model_says(computer, beside, movers):
    cores = computer(2)
    taken = affinities(Pace(1, 1, beside, 0.0, 0.0), cores)
    assert taken == {
        "gpu": Affinity(1, (0,)),
        "cpu": Affinity(1, (1,)),
        "d2h": Affinity(1, movers),
        "h2d": Affinity(1, movers),
    }


def test_with_spare_cores_the_movers_have_their_own(computer):
    cores = computer(8)
    taken = affinities(Pace(cores.gpu, cores.cpu, "", 0.0, 0.0), cores)
    assert [taken[lane].cores for lane in ("gpu", "cpu", "h2d")] == [(0, 1, 2), (3, 4, 5, 6), (7,)]


def test_lanes_that_follow_one_another_have_every_core(computer):
    cores = computer(2)
    taken = affinities(Pace(2, 2, "", 0.0, 0.0), cores)
    assert {affinity.cores for affinity in taken.values()} == {(0, 1)}
    assert (taken["gpu"].threads, taken["h2d"].threads) == (2, 1)


def in_a_thread(work):
    """What `work` returns in a fresh thread, so that nothing of this one is changed."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    thread.join()
    return answers[0]


@linux
def test_one_thread_is_pinned_to_its_core():
    core = min(os.sched_getaffinity(0))

    def work():
        pin(Affinity(1, (core,)))
        return os.sched_getaffinity(0), torch.get_num_threads()

    assert in_a_thread(work) == ({core}, 1)


@linux
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores")
def test_two_threads_are_pinned_to_a_core_each_and_let_go_again():
    one, two = sorted(os.sched_getaffinity(0))[:2]

    def work():
        name_thread("gpu")
        torch.get_num_threads()
        pin(Affinity(2, (one, two)))
        pinned = os.sched_getaffinity(0), [os.sched_getaffinity(other) for other in affinity_module._others()]
        pin(Affinity(1, (two,)))
        return (*pinned, os.sched_getaffinity(0))

    assert in_a_thread(work) == ({one}, [{two}], {two})


@linux
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores")
def test_a_lane_that_is_pinned_leaves_another_engines_lane_of_that_name_where_it_is():
    one, two = sorted(os.sched_getaffinity(0))[:2]
    pinned, done = threading.Event(), threading.Event()
    found = []

    def other():
        name_thread("gpu")
        pin(Affinity(1, (one,)))
        pinned.set()
        done.wait(10)
        found.append(os.sched_getaffinity(0))

    def work():
        name_thread("gpu")
        torch.get_num_threads()
        assert pinned.wait(10)
        pin(Affinity(2, (one, two)))

    thread = threading.Thread(target=other)
    thread.start()
    try:
        in_a_thread(work)
    finally:
        done.set()
        thread.join()
    assert found == [{one}]


@linux
def test_threads_that_end_meanwhile_are_passed_over(tmp_path, monkeypatch):
    """The system lists a thread, and has nothing of it to read a moment later."""
    own = threading.get_native_id()
    for thread, name in ((own, "gpu-1"), (own + 1, None), (own + 2, "gpu-1"), (own + 3, "cpu-1")):
        (tmp_path / str(thread)).mkdir()
        if name is not None:
            (tmp_path / str(thread) / "comm").write_text(name)
    monkeypatch.setattr(affinity_module, "_TASKS", tmp_path)
    assert affinity_module._others() == [own + 2]
