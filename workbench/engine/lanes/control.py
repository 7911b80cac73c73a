"""Control of a run: it lets the run go on, pause or end. Long operations check it between two steps."""

from __future__ import annotations

import threading
import time

from workbench.core.errors import StoppedError

MOST_SLEPT = 0.05
"""Most seconds between two checks for a stop request."""


class Control:
    """Lets the work of one run go on, pause or end. Every method may be called from any thread.

    Attributes
    ----------
    gate : Event
        Cleared while the run is paused: no task starts then.
    ending : bool
        True once the run was stopped, for good.
    phase : str
        Words for what the run does before its clock starts.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.ending = self._drained = False
        self.phase = ""

    @property
    def stopped(self) -> bool:
        """True while the remaining work must not be done."""
        return self.ending or self._drained

    def hold(self) -> None:
        """Let no task start until `go`; a run that is ending is not paused."""
        self.gate.clear()
        if self.stopped:  # `stop` and `drain` set this before they open the gate
            self.gate.set()

    def go(self) -> None:
        """Go on after `hold`."""
        self.gate.set()

    def stop(self) -> None:
        """End the run, also if it is paused."""
        self.ending = True
        self.gate.set()

    def drain(self) -> None:
        """End the plan under way, also if it is paused: one of its tasks failed, or the wait for it did."""
        self._drained = True
        self.gate.set()

    def renew(self) -> None:
        """Begin another plan, unless the run was stopped."""
        self._drained = False

    def check(self) -> None:
        """Raise if the remaining work must not be done; long work calls this between two steps.

        Raises
        ------
        StoppedError
            If the run was stopped, or the plan is drained.
        """
        if self.stopped:
            raise StoppedError("the run was stopped.")

    def sleep(self, seconds: float) -> None:
        """Sleep for that long, or until the run ends."""
        until = time.perf_counter() + seconds
        while seconds > 0 and not self.stopped:
            time.sleep(min(seconds, MOST_SLEPT))
            seconds = until - time.perf_counter()
