"""`sweep`: the grid is made and checked, what is on disk is found, and the rest is read and committed as it comes."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from workbench.analysis.sweeps.found import Sweep
from workbench.analysis.sweeps.grid import Grid, Place, make_grid
from workbench.analysis.sweeps.keys import Keys
from workbench.analysis.sweeps.reading import Base, Reader, Row, is_live
from workbench.analysis.sweeps.running import Task, read_all
from workbench.core.catalogue import cache_path
from workbench.core.errors import ScenarioError, WorkbenchError
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.simulate import simulate

_COMMIT = 0.2
"""Most seconds between two commits."""


def sweep(
    scenario: Scenario,
    schedule: Schedule | None = None,
    *,
    over: Mapping[str, Any],
    read: Reader = simulate,
    zipped: bool = False,
    executor: Executor | None = None,
    store: str | Path | None = None,
    refresh: bool = False,
) -> Sweep:
    """Read a scenario with other values in some of its fields, at every combination of them.

    Each reading is committed to disk as it comes, under a key of scenario, schedule, reader and code: a sweep that was
    interrupted goes on where it was, and a point that was read before is not read again. A point that fails is set
    aside with its reason. Each point also has the bound of its scenario.

    Parameters
    ----------
    scenario : Scenario
    schedule : Schedule, optional
        Needed unless the sweep goes over ``"schedule"``.
    over : mapping of str to values
        Values by the dotted name of a field, such as ``{"memory.kv_capacity": ["10GB", "20GB"]}``; those of a whole
        part may be a dict with a label for each. `workbench.scenario.fields.fields_of` lists the fields.
    read : callable (Scenario, Schedule) -> Result
        `simulate`, `bound` or `run`, or a function of one's own; a run is made in this process, one after the other.
    zipped : bool
        True to go along all fields together instead of combining their values.
    executor : concurrent.futures.Executor, optional
        Where points are read, such as Dask's ``client.get_executor()``. By default in this process for the first
        second; then, if the rest would take more than ten seconds, on one process for each core.
    store : str or Path, optional
        File of the readings; by default one in the user's cache.
    refresh : bool
        True to read points again that are on disk.

    Returns
    -------
    Sweep
        A data set with named axes, the points that were set aside among them.

    Raises
    ------
    ScenarioError
        If a name is no field, a value is none of its field, or a schedule is missing.
    SweepError
        If the executor is broken; what was read until then is on disk.

    Examples
    --------
    >>> sweep(scenario, over={"memory.kv_capacity": ["10GB", "30GB"], "schedule": [VSLPipe()]})  # doctest: +SKIP
    """
    base = Base(scenario, _first_schedule(schedule, over), _checked(read))
    grid = make_grid(scenario, base.schedule, over, zipped=zipped)
    path = cache_path("sweeps.sqlite") if store is None else Path(store)
    with _Readings(base, grid, path, refresh=refresh) as readings:
        read_all(base, readings.missing, executor, readings.collect)
    return Sweep.of(base, grid, readings.rows)


def _first_schedule(schedule: Schedule | None, over: Mapping[str, Any]) -> Schedule:
    """The schedule of the sweep, or the first that it goes over."""
    if schedule is None and isinstance(over, Mapping):
        given = over.get("schedule")
        values = given.values() if isinstance(given, Mapping) else given
        schedule = next(iter(values), None) if isinstance(values, Iterable) else values
    if not isinstance(schedule, Schedule):
        raise ScenarioError(
            "a sweep needs a schedule: give one, as in sweep(scenario, VSLPipe(), over=...), or go over several with "
            f"over={{'schedule': [Sequential(prefetch=True), VSLPipe()]}}, not {schedule!r}."
        )
    return schedule


def _checked(read: object) -> Reader:
    if not callable(read):
        raise ScenarioError(f"a sweep reads with a function such as wb.simulate, not {read!r}.")
    return read


class _Readings:
    """The rows of a sweep, those on disk and those that come, with their progress."""

    def __init__(self, base: Base, grid: Grid, path: Path, *, refresh: bool) -> None:
        from workbench.analysis.sweeps.store import Store  # loads SQLite, which few who import the workbench need

        self.rows = dict[Place, Row]()
        self._store = Store(path)
        self._keys = self._make_keys(base, grid)
        if not refresh:
            self._find()
        self.missing = [Task(place, grid.values(place)) for place in grid.places() if place not in self.rows]
        self._pending = list[tuple[str, Row]]()
        self._committed = time.monotonic()
        self._bar = _bar(math.prod(grid.shape), len(self.rows))

    def _make_keys(self, base: Base, grid: Grid) -> dict[Place, str]:
        """The key of every point that has one."""
        keys = Keys(base)
        found = dict[Place, str]()
        without = False
        for place in grid.places():
            try:
                key = keys.of(grid.values(place))
            except WorkbenchError:
                continue  # reading it will tell
            if key is None:
                without = True
            else:
                found[place] = key
        if without and is_live(base.read):
            warnings.warn(
                "operations, schedules or readers of your own have no version, so their points are not kept on disk.",
                RuntimeWarning,
                stacklevel=4,
            )
        return found

    def _find(self) -> None:
        rows = self._store.found(self._keys.values())
        self.rows |= {place: rows[key] for place, key in self._keys.items() if key in rows}

    def collect(self, read: Sequence[tuple[Place, Row]]) -> None:
        """Take readings, and commit them at the latest `_COMMIT` seconds after the last commit."""
        self.rows |= read
        self._bar.update(len(read))
        self._pending += [(self._keys[place], row) for place, row in read if place in self._keys and row.lasting]
        if time.monotonic() - self._committed > _COMMIT:
            self._commit()

    def _commit(self) -> None:
        self._store.add(self._pending)
        self._pending = []
        self._committed = time.monotonic()

    def __enter__(self) -> _Readings:
        return self

    def __exit__(self, *raised: object) -> None:
        self._commit()
        self._store.close()
        self._bar.close()


def _bar(total: int, initial: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, initial=initial, desc="sweep", unit="point", delay=1, mininterval=1, leave=False)
