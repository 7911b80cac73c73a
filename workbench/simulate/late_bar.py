"""A progress bar for long simulations; short ones neither make nor import it."""

from __future__ import annotations

import math
import threading
from time import monotonic
from typing import Any

DELAY = 1.0
"""Seconds after which a bar is made."""


class LateBar:
    """Counts output tokens, and draws them on stderr once the simulation has lasted `DELAY` seconds.

    Only the main thread draws a bar: a simulation in the background belongs to something that shows its own progress.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._made = 0
        shown = threading.current_thread() is threading.main_thread()
        self._due = monotonic() + DELAY if shown else math.inf
        self._bar: Any = None

    def add(self, tokens: float) -> None:
        """Count that many more tokens."""
        self._made += int(tokens)
        if self._bar is None and monotonic() < self._due:
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self._total, unit="tok", desc="simulate", leave=False, mininterval=1)
        self._bar.update(self._made - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
