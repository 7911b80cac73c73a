"""`tune --cpu`: settings of the CPU kernels for the computer at hand, found, printed and kept."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from workbench.bench import record
from workbench.bench.tuning.search import ratios, search, timing_of
from workbench.core.errors import WorkbenchError
from workbench.core.quiet import OTHERS, listening
from workbench.kernels import Parameters, cpu_family, features, parameters

_CHECKED = 21
"""Rounds for the speeds that are told at the end."""
BACK = 0.97
"""Target: least speed with the settings that were found again, relative to the shipped ones."""


def tune_cpu(*, seconds: float = 600, out: Path | None = None, say: Callable[[str], None] = record.say) -> Parameters:
    """Search for faster settings of the CPU kernels, print those that differ from the family's, and keep them.

    Parameters
    ----------
    seconds : float
        Time for the search, about [s].
    out : Path, optional
        File for the settings that differ from the family's; by default the one in the user's cache, from which the
        kernels take them.
    say : callable
        Receives each line.

    Raises
    ------
    WorkbenchError
        If this CPU takes the portable path, on which no setting has an effect, or the file cannot be written.
    """
    if not features().lanes:
        raise WorkbenchError(f"nothing can be tuned on the portable path ({features().reason}).")
    say(f"{cpu_family()}, {features()}")
    path = _writable(out or Parameters.tuned_path())
    with TemporaryDirectory() as folder, listening(also=_children) as noise:
        found = search(parameters(), Path(folder), seconds=seconds, say=say, tables=Parameters.shipped())
    if not noise.quiet:
        say(f"other programs took {noise.others:.0%} of the cores, more than {OTHERS:.0%}: tune again when they rest")
    if found.ended:
        say(f"the search ended early: {found.ended}")
    if found.untried:
        say(f"no time was left for {', '.join(found.untried)}")
    _keep(found.settings, path, say)
    return found.settings


def _writable(path: Path) -> Path:
    """The path, if a file can be written there.

    Raises
    ------
    WorkbenchError
        If not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _beside(path).touch()
        _beside(path).unlink()
    except OSError as error:
        raise WorkbenchError(f"{path} cannot be written ({error.strerror}); give another file with --out.") from None
    return path


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}")


def _keep(settings: Parameters, path: Path, say: Callable[[str], None]) -> None:
    """Write the settings that differ from those of the family; without any, remove the file."""
    changes = settings.text(Parameters.of_family(cpu_family()))
    if not changes:
        path.unlink(missing_ok=True)
        say("the table of the family stays")
        return
    _beside(path).write_text(changes, encoding="utf-8")
    _beside(path).replace(path)
    say(f"settings that differ from the table of the family, written to {path}:\n\n{changes}")
    say("rates of this computer may have changed; Machine.local(device='cpu', refresh=True) measures them anew")


def _children() -> float:
    """Core-seconds of the processes that this one began and that have ended."""
    used = os.times()
    return used.children_user + used.children_system


def bench_tuning(
    *, tries: int = 3, seed: int = 0, seconds: float = 600, say: Callable[[str], None] = record.say
) -> list[float]:
    """Spoil the shipped settings, search from there, and time what was found beside the shipped settings.

    Parameters
    ----------
    tries : int
    seed : int
        Seed of the first spoilt table.
    seconds : float
        Time for each search, about [s].
    say : callable
        Receives each line.

    Returns
    -------
    list of float
        Speed with the settings that were found relative to the shipped ones, of each try: that of the slowest group.

    Raises
    ------
    WorkbenchError
        If a search was stopped.
    """
    shipped = Parameters.of_family(cpu_family())
    speeds = list[float]()
    for number in range(seed, seed + tries):
        spoilt = spoilt_settings(shipped, number)
        with TemporaryDirectory() as name:
            folder = Path(name)
            found = search(spoilt, folder, seconds=seconds, say=say, tables=_of_others(shipped, spoilt))
            if found.ended:
                raise WorkbenchError(f"the search ended early: {found.ended}")
            before = _relative(spoilt, shipped, folder)
            after = _relative(found.settings, shipped, folder)
        speeds.append(min(after.values()))
        for group, speed in after.items():
            say(f"seed {number}, {group}: {before[group]:.3f} of the shipped speed, {speed:.3f} after the search")
    say(f"least speed of each try relative to the shipped settings: {', '.join(f'{speed:.3f}' for speed in speeds)}")
    say(f"{BACK:g} is asked for")
    return speeds


def _of_others(shipped: Parameters, spoilt: Parameters) -> dict[str, Parameters]:
    """The tables of other CPUs; groups that they share with the shipped one, which is to be found, are spoilt."""
    found = dict[str, Parameters]()
    for name, table in Parameters.shipped().items():
        same = [group for group in Parameters.GROUPS if _alike(spoilt, group, table, shipped)]
        found[name] = replace(table, **{group: getattr(spoilt, group) for group in same})
    return found


def _alike(start: Parameters, group: str, one: Parameters, other: Parameters) -> bool:
    """True if both have the same settings of a group, as far as they matter here."""
    lanes = features().lanes
    return start.taking(group, one, lanes) == start.taking(group, other, lanes)


def spoilt_settings(shipped: Parameters, seed: int) -> Parameters:
    """Settings that were drawn at random, each one other than the shipped one if it may have another value."""
    drawn = random.Random(seed)
    found = shipped
    for group in Parameters.GROUPS:
        for setting, values in shipped.values(group, features().lanes).items():
            others = [value for value in values if value != shipped.at(group, setting)]
            found = found.having(group, setting, drawn.choice(others))
    return found


def _relative(settings: Parameters, shipped: Parameters, folder: Path) -> dict[str, float]:
    """Speed with settings relative to the shipped ones, by group."""
    found = dict[str, float]()
    for group in Parameters.GROUPS:
        with ExitStack() as stack:
            base, other = (timing_of(group, each, folder, stack) for each in (shipped, settings))
            found[group] = 1 / ratios(base, [other], _CHECKED)[0].mean
    return found
