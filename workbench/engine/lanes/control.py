"""Control of a run that goes on, pauses or ends: long operations check it between two steps."""

from __future__ import annotations

import threading
import time

from workbench.core.errors import StoppedError

MOST_SLEPT = 0.05
"""Seconds without a look at whether the run was stopped."""


class Control:
    """Tells the work of one run whether to go on. Every method may be called from any thread.

    Attributes
    ----------
    gate : Event
        Cleared while the run is held: no task starts then.
    ending : bool
        True once the run was asked to end, for good.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.ending = self._drained = False

    @property
    def stopped(self) -> bool:
        """True while work that is left shall not be done."""
        return self.ending or self._drained

    def hold(self) -> None:
        """Let no task start until `go`; what ends is not held."""
        self.gate.clear()
        if self.stopped:  # `stop` and `drain` say so before they open the gate
            self.gate.set()

    def go(self) -> None:
        """Go on after `hold`."""
        self.gate.set()

    def stop(self) -> None:
        """End the run, also if it is held."""
        self.ending = True
        self.gate.set()

    def drain(self) -> None:
        """End the plan that is at work, also if it is held: one of its tasks failed, or the wait for it did."""
        self._drained = True
        self.gate.set()

    def renew(self) -> None:
        """Begin another plan, unless the run was asked to end."""
        self._drained = False

    def check(self) -> None:
        """Called between two steps of long work.

        Raises
        ------
        StoppedError
            If the rest shall not be done.
        """
        if self.stopped:
            raise StoppedError("the run was stopped.")

    def sleep(self, seconds: float) -> None:
        """Sleep so long, or until work shall end."""
        until = time.perf_counter() + seconds
        while seconds > 0 and not self.stopped:
            time.sleep(min(seconds, MOST_SLEPT))
            seconds = until - time.perf_counter()
