"""Affinity of threads: lanes, and the threads that share their work, on cores of their own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from workbench.hardware.profile import Cores, Pace

_TASKS = Path("/proc/self/task")
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_LINUX = sys.platform == "linux"


class Affinity(NamedTuple):
    """Number of torch threads of a lane, and the cores that it may use; without cores, the system chooses."""

    threads: int
    cores: tuple[int, ...]


def affinities(pace: Pace, cores: Cores) -> dict[str, Affinity]:
    """Affinities of the four lanes. Compute lanes that work beside each other have cores of their own."""
    mine = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    gpu = mine[: cores.gpu]
    cpu = mine[cores.gpu : cores.gpu + cores.cpu]
    spare = mine[cores.gpu + cores.cpu :]
    movers = {"gpu": gpu, "cpu": cpu}.get(pace.beside, spare) or mine
    apart = pace.gpu + pace.cpu <= len(mine)
    return {
        "gpu": Affinity(pace.gpu, gpu if apart else mine),
        "cpu": Affinity(pace.cpu, cpu if apart else mine),
        "d2h": Affinity(1, movers),
        "h2d": Affinity(1, movers),
    }


def pin(affinity: Affinity) -> None:
    """Give the calling thread its torch threads and cores.

    Two threads are pinned to one core each. Without that, the system often wakes the second on the core of the first:
    experts of 64 rows (8 of 1024 x 2048, bf16) took 28 ms, and 21 ms when pinned (2 Zen 4 cores). A larger team is not
    pinned, because libgomp ends threads that an operation does not need, and new ones inherit the core of the first.
    """
    torch.set_num_threads(affinity.threads)
    if not affinity.cores or not _LINUX:
        return
    os.sched_setaffinity(0, affinity.cores)
    if affinity.threads == 2 and len(affinity.cores) >= 2:
        torch.ones(1 << 17).fill_(0.0)  # the first shared work starts the other thread
        for other in _others():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(other, affinity.cores[1:])
        os.sched_setaffinity(0, affinity.cores[:1])


def name_thread(lane: str) -> None:
    """Name the calling thread for the system by its lane and its number, so that no other thread has the name.

    Threads that it starts inherit the name, by which `pin` finds them. The system cuts it after 15 bytes.
    """
    if _LINUX:
        name = f"{lane}-{threading.get_native_id()}"
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def end_sleeps_on_time() -> None:
    """Set the timer slack of the calling thread to 1 us instead of 50 us."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def _others() -> list[int]:
    """Threads that the calling thread started, which bear its name."""
    own = threading.get_native_id()
    name = (_TASKS / str(own) / "comm").read_text()
    found = list[int]()
    for other in (int(task.name) for task in _TASKS.iterdir()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            if other != own and (_TASKS / str(other) / "comm").read_text() == name:
                found.append(other)
    return found
