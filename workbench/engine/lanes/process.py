"""Process-wide state of the engine: settings that hold while lanes work, and the live runs.

Importing the engine changes nothing. The first user of lanes saves and changes the settings; the last restores them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from workbench.core.errors import EngineError, StoppedError
from workbench.engine.lanes.control import Control

# A lane that needs the GIL waits at most this long for a thread that computes in Python. With a notebook's 30 ms of
# Python per 200 ms beside it, a pass took 13 % longer at the default of 5 ms and 10 % longer at this (2 Zen 4 cores).
SWITCH_SECONDS = 5e-4

# Idle pool threads must not spin on a core that another lane needs. But an expert is a dozen short parallel regions in
# a row: a bf16 linear (16 x 1024 x 4096, two threads) took 1.28 ms if idle threads sleep at once, 0.97 ms if they sleep
# after 1,000 turns, and 0.95 ms after 100,000 (Zen 4).
_OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}

# Up to 256 MB of freed memory stay with the process: otherwise every buffer of an iteration is mapped and cleared anew
# (queries, keys and values of 1,024 rows 512 wide: 10.8 ms, and 6.0 ms when memory is kept; Zen 4). glibc's thresholds
# cannot be read back; afterwards they are set to the values at which glibc's own adjustment ends once a large buffer
# was freed.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENAS = -8
_KEPT = {_MMAP_THRESHOLD: 1 << 26, _TRIM_THRESHOLD: 1 << 28}
_USUAL = {_MMAP_THRESHOLD: 1 << 25, _TRIM_THRESHOLD: 1 << 26}
# Threads share one arena from the first run on: glibc has no way back from that. Of every other arena it keeps what was
# freed last, and each run's threads take others: after 14 runs with 110 MB of buffers each, 170 MB had stayed with the
# process; with one arena, nothing. Runs take as long (two Sapphire Rapids cores).
_ONE_ARENA = {_ARENAS: 1}
_FAREWELL = 2.0
"""Seconds that Python's end waits for the thread of an ended run to drop its tensors; a user's code may never end."""
_USERS_CHOICE = {
    _TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_",
    _MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_",
    _ARENAS: "MALLOC_ARENA_MAX",
}
"""Environment variables that set the same parameters."""


@contextmanager
def sleepy_openmp() -> Iterator[None]:
    """Set the environment so that idle pool threads of torch sleep soon, if torch is imported within this context.

    libgomp reads these variables once, when torch loads it. The environment is restored at the end, so that programs
    that are started later do not inherit them.
    """
    missing = [name for name in _OPENMP if name not in os.environ]
    os.environ.update({name: _OPENMP[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


@dataclass(eq=False)
class Occupation:
    """Work that a process does one at a time, until `end`; `what` names it in messages."""

    what: str
    control: Control
    began: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None
    """The thread that called `end`."""

    def end(self) -> None:
        """Mark the work as ended; call this however it ended."""
        _PROCESS.leave(self)

    def __enter__(self) -> Control:
        return self.control

    def __exit__(self, *_: object) -> None:
        self.end()


class _Process:
    """Counts the users of lanes and knows the live runs of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooked = False
        self._forget()

    def _forget(self) -> None:
        self._users = 0
        self._switch_seconds = 0.0
        self._threads = 0
        self._at_work = list[Occupation]()
        self._closed = False

    def take(self) -> None:
        """Set the settings that lanes need."""
        import torch

        with self._lock:
            if not self._users:
                self._switch_seconds = sys.getswitchinterval()
                self._threads = torch.get_num_threads()
                sys.setswitchinterval(SWITCH_SECONDS)
                _malloc(_KEPT)
            self._users += 1

    def give_back(self) -> None:
        """Restore the settings, if nobody else needs them. Ended lanes changed the threads that new threads inherit."""
        import torch

        with self._lock:
            self._users -= 1
            if not self._users:
                sys.setswitchinterval(self._switch_seconds)
                torch.set_num_threads(self._threads)
                _malloc(_USUAL)

    def enter(self, what: str, alongside: bool) -> Occupation:
        """See `occupy`."""
        if not alongside:
            self._await_those_that_end()
        with self._lock:
            if self._closed:
                raise StoppedError("Python ends, and begins no live run any more.")
            if self._at_work and not alongside:
                other = self._at_work[0]
                raise EngineError(
                    f"{other.what} goes on in this process, for {time.monotonic() - other.began:.0f} s now, and a "
                    "second would share its cores; wait for it, or stop it (wb.run and wb.start take alongside=True)."
                )
            _malloc(_ONE_ARENA)
            self._at_work.append(mine := Occupation(what, Control()))
            if not self._hooked:
                self._hooked = True
                atexit.register(self._end_all)
                if hasattr(os, "register_at_fork"):
                    os.register_at_fork(after_in_child=self._be_child)
        return mine

    def leave(self, occupation: Occupation) -> None:
        """Remove work that has ended."""
        with self._lock:
            if occupation in self._at_work:
                self._at_work.remove(occupation)
        occupation.thread = threading.current_thread()
        _trim()
        occupation.ended.set()

    def _await_those_that_end(self) -> None:
        for other in list(self._at_work):
            if other.control.ending:
                other.ended.wait()

    def _end_all(self) -> None:
        """End every run before Python ends: a thread that is inside torch then would abort the process."""
        with self._lock:
            self._closed = True
            going = list(self._at_work)
        for each in going:
            each.control.stop()
        for each in going:
            each.ended.wait()
            if each.thread is not None:
                each.thread.join(_FAREWELL)

    def _be_child(self) -> None:
        """Forget all work in a forked process, which has none of the threads."""
        if self._users:
            sys.setswitchinterval(self._switch_seconds)
        self._lock = threading.Lock()
        self._forget()


def _malloc(settings: dict[int, int]) -> None:
    """Set parameters of glibc's allocator, but none that the user has chosen."""
    if platform.libc_ver()[0] == "glibc" and "GLIBC_TUNABLES" not in os.environ:
        for parameter, size in settings.items():
            if _USERS_CHOICE[parameter] not in os.environ:
                ctypes.CDLL(None).mallopt(parameter, size)


def _trim() -> None:
    """Give freed memory back to the system, so that the next run finds as much as this one did."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


_PROCESS = _Process()
take = _PROCESS.take
give_back = _PROCESS.give_back


def occupy(what: str, *, alongside: bool = False) -> Occupation:
    """Begin work that a process does one at a time. It waits for work that is stopping; Python's end stops all work.

    Raises
    ------
    EngineError
        If other such work is under way, and `alongside` is not set.
    """
    return _PROCESS.enter(what, alongside)
