"""Wall time that can be paused."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds since `start`, without pauses. Any thread may read it, but only one may pause it."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._pauses: list[tuple[float, float]] = []

    def start(self) -> None:
        """Begin at zero."""
        self._zero = time.perf_counter()
        self._pauses = []

    def hold(self) -> None:
        """Let no time pass."""
        if not self.held:
            self._pauses.append((time.perf_counter(), float("inf")))

    def go(self) -> None:
        """Let time pass again."""
        if self.held:
            self._pauses[-1] = (self._pauses[-1][0], time.perf_counter())

    @property
    def held(self) -> bool:
        """True between `hold` and `go`."""
        return bool(self._pauses) and self._pauses[-1][1] == float("inf")

    def at(self, reading: float) -> float:
        """The time shown when `time.perf_counter` read `reading`; a time within a pause is that of its start."""
        return reading - self._zero - sum(min(reading, end) - begin for begin, end in self._pauses if begin < reading)

    @property
    def now(self) -> float:
        """The time shown now."""
        return self.at(time.perf_counter())
