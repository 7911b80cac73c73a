"""The search: per group the whole tables of other CPUs, then one setting after the other, in turns with the best.

Settings of one table belong together: with some, changing any one of them alone gains nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.bench.tuning.timing import Timing, TimingError
from workbench.hardware import usable_cores
from workbench.kernels import Parameters, features

ROUNDS = 7
_OF_MEDIAN = 1.4826 * 1.2533
"""Standard error of a median of n normal numbers times the root of n, relative to their median distance from it."""
_LEAST = 0.01
"""Gains below this are not kept."""
_WORST = 1.03
"""Most time that a call may always take, relative to the settings at the start and to the best so far."""


class Ratio(NamedTuple):
    """Times with some settings relative to those with others.

    Attributes
    ----------
    mean : float
        Geometric mean over all calls.
    error : float
        Standard error of the mean, relative.
    worst : float
        The largest of the calls' ratios, each less twice its own standard error.
    """

    mean: float
    error: float
    worst: float

    @property
    def spares(self) -> bool:
        """True if no call is slower by more than a few percent, or than all calls gain on average."""
        return self.worst <= max(_WORST, 1 / self.mean)

    @property
    def wins(self) -> bool:
        """True if it is faster by more than the noise, and spares every call."""
        return self.mean < 1 - max(_LEAST, 3 * self.error) and self.spares


@dataclass
class Found:
    """The settings that a search has found so far.

    Attributes
    ----------
    settings : Parameters
    gains : dict of {str: float}
        Speed relative to what was before, of each setting that was changed, and by a group's name of its whole table.
    untried : list of str
        Settings for which no time was left.
    ended : str
        The reason if the search was stopped.
    """

    settings: Parameters
    gains: dict[str, float] = field(default_factory=dict)
    untried: list[str] = field(default_factory=list)
    ended: str = ""


def search(
    start: Parameters,
    folder: Path,
    *,
    seconds: float,
    say: Callable[[str], None],
    tables: Mapping[str, Parameters] | None = None,
) -> Found:
    """Search for faster settings from `start` on.

    Parameters
    ----------
    start : Parameters
    folder : Path
        An empty folder for compiled code.
    seconds : float
        Begin no further setting after so long; the groups have equal shares of it.
    say : callable
        Receives a line for the tables and for each setting.
    tables : mapping of str to Parameters, optional
        Settings of other CPUs, by the names of their tables.

    Returns
    -------
    Found
        On Ctrl-C, and if a process cannot go on, what was found so far.
    """
    found = Found(start)
    end = time.monotonic() + seconds
    try:
        groups = _smallest_first(start)
        for number, group in enumerate(groups):
            now = time.monotonic()
            own_end = now + max(0.0, end - now) / (len(groups) - number)
            _search_group(group, found, tables or {}, folder, own_end, say)
    except KeyboardInterrupt:
        found.ended = "it was interrupted"
    except TimingError as error:
        found.ended = str(error)
    return found


def _smallest_first(settings: Parameters) -> list[str]:
    """The groups by the number of their settings: what a small one leaves of its share of the time goes to the rest."""
    lanes = features().lanes
    return sorted(Parameters.GROUPS, key=lambda group: len(settings.values(group, lanes)))


def _search_group(
    group: str,
    found: Found,
    tables: Mapping[str, Parameters],
    folder: Path,
    end: float,
    say: Callable[[str], None],
) -> None:
    lanes = features().lanes
    names = found.settings.values(group, lanes)
    if time.monotonic() > end:
        found.untried += [f"{group}.{setting}" for setting in names]
        return
    with ExitStack() as stack:
        first = best = timing_of(group, found.settings, folder, stack)

        def try_all(name: str, now: str, told: Mapping[Parameters, str]) -> None:
            """Try several settings, and keep the fastest if it wins."""
            nonlocal best
            tried = _compiled(group, list(told), folder, stack, say)
            winner = _winner(best, tried)
            for timing in tried:
                if timing is not winner:
                    timing.end()
            if winner is None:
                say(f"{name}: {now} stays")
                return
            gain = ratios(best, [winner])[0]
            if not gain.wins or not ratios(first, [winner])[0].spares:
                winner.end()
                say(f"{name}: {now} stays; a second look showed no gain beyond the noise, or a slower call")
                return
            say(f"{name}: {now} -> {told[winner.settings]}, {1 / gain.mean:.3f} times as fast")
            found.gains[name] = 1 / gain.mean
            found.settings = winner.settings
            if best is not first:
                best.end()
            best = winner

        others = {found.settings.taking(group, table, lanes): f"that of {name}" for name, table in tables.items()}
        others.pop(found.settings, None)
        if others:
            try_all(group, "the table", others)
        known: Parameters | None = None
        untried = list(names)
        while known != found.settings and time.monotonic() < end:  # a change may let other values of the rest gain
            known = found.settings
            for setting, values in names.items():
                if time.monotonic() > end:
                    break
                now = found.settings.at(group, setting)
                changed = {found.settings.having(group, setting, value): str(value) for value in values if value != now}
                try_all(f"{group}.{setting}", str(now), changed)
                if setting in untried:
                    untried.remove(setting)
        found.untried += [f"{group}.{setting}" for setting in untried]


def timing_of(group: str, settings: Parameters, folder: Path, stack: ExitStack) -> Timing:
    """A process that times a group's calls until the stack is left."""
    timing = Timing(group, settings, folder)
    stack.callback(timing.end)
    return timing


def _compiled(
    group: str, tried: Sequence[Parameters], folder: Path, stack: ExitStack, say: Callable[[str], None]
) -> list[Timing]:
    """Processes with these settings that have compiled their calls, as many at a time as there are cores."""
    waiting = deque(tried)
    compiling = deque[Timing]()
    found = list[Timing]()
    while waiting or compiling:
        while waiting and len(compiling) < usable_cores():
            compiling.append(timing_of(group, waiting.popleft(), folder, stack))
        timing = compiling.popleft()
        try:
            timing.compile()
            found.append(timing)
        except TimingError as error:
            say(f"left out: {error}")
    return found


def _winner(best: Timing, tried: Sequence[Timing]) -> Timing | None:
    """The fastest of those that win against the best so far; None if there is none."""
    seen = list(zip(tried, ratios(best, tried), strict=True)) if tried else []
    winners = [(timing, ratio) for timing, ratio in seen if ratio.wins]
    return min(winners, key=lambda each: each[1].mean)[0] if winners else None


def ratios(base: Timing, others: Sequence[Timing], rounds: int = ROUNDS) -> list[Ratio]:
    """Times by others relative to those by the base, every call in turns, in random order."""
    every = [base, *others]
    names = base.compile()
    for timing in others:
        timing.compile()
    seconds = np.empty((len(every), rounds, len(names)))
    random = np.random.default_rng(0)
    for which in range(rounds):
        for place, name in enumerate(names):
            for one in random.permutation(len(every)):
                seconds[one, which, place] = every[one].seconds(name)
    relative = seconds[1:] / seconds[0]
    return [_ratio(own) for own in relative]


def _ratio(relative: npt.NDArray[np.float64]) -> Ratio:
    """The ratio of times (rounds, calls) that were measured side by side."""
    logs = np.log(relative)
    of_calls = np.median(logs, axis=0)
    distances = np.abs(logs - of_calls)
    error = _OF_MEDIAN * float(np.median(distances)) / math.sqrt(logs.size)
    errors = _OF_MEDIAN * np.median(distances, axis=0) / math.sqrt(len(logs))
    return Ratio(math.exp(of_calls.mean()), error, math.exp((of_calls - 2 * errors).max()))
