"""Readings of a grid's points: those that are there, and those that are read when a picture needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from workbench.analysis.explain import explain
from workbench.analysis.sweeps.found import Point, Sweep
from workbench.analysis.sweeps.grid import Axis, Grid, Place
from workbench.analysis.sweeps.keys import Keys
from workbench.analysis.sweeps.reading import Base, Reader, Row, read_point
from workbench.analysis.sweeps.store import Store
from workbench.core.errors import WorkbenchError
from workbench.core.result import Result, Source
from workbench.perfmodels import bound
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.simulate import simulate
from workbench.widgets.explore.look import Matrix

Overtaken = Callable[[], bool]
"""True once a newer look waits."""


def never() -> bool:
    """Nothing overtakes it."""
    return False


class Readings:
    """The rows of a grid, which grow as points are read. They may be read by several threads.

    Parameters
    ----------
    base : Base
        Scenario, schedule and reader from which all points are made.
    grid : Grid
    rows : mapping of tuple of int to Row
        The points that were read before.
    store : Path, optional
        File of a sweep's readings, where points are found and to which they are committed.
    """

    def __init__(self, base: Base, grid: Grid, rows: Mapping[Place, Row], store: Path | None = None) -> None:
        self.base = base
        self.grid = grid
        self.rows = dict(rows)
        self.bounds = dict[Place, Row]()
        self._store = store
        self._keys = Keys(base)
        self._reading = threading.RLock()
        self._sentences = dict[Place, list[str]]()

    def missing(self, places: Iterable[Place]) -> list[Place]:
        """The places that are not read yet."""
        return [place for place in places if place not in self.rows]

    def find(self, places: Iterable[Place]) -> None:
        """Take the readings that are in the file."""
        missing = self.missing(places)
        if self._store is None or not missing:
            return
        keys = {place: key for place in missing if (key := self._key(place)) is not None}
        store = Store(self._store)
        rows = store.found(keys.values())
        store.close()
        self.rows |= {place: rows[key] for place, key in keys.items() if key in rows}

    def _key(self, place: Place) -> str | None:
        try:
            return self._keys.of(self.grid.values(place))
        except WorkbenchError:
            return None

    def bound(self, place: Place) -> None:
        """Read the bound of a point."""
        if place not in self.rows and place not in self.bounds:
            self.bounds[place] = read_point(replace(self.base, read=bound), self.grid.values(place))

    def known(self, place: Place) -> Row | None:
        """The reading of a point, or the reason why its bound could not be read; None for neither."""
        before = self.bounds.get(place)
        return self.rows.get(place, before if before is not None and before.problem else None)

    def read(self, place: Place, overtaken: Overtaken = never) -> Row | None:
        """The reading of a point, which is read if it is not there, and committed; None if it was overtaken."""
        with self._reading:
            if place not in self.rows:
                row = self._read(place, overtaken)
                if row is None:
                    return None
                self._commit(place, row)
                self.rows[place] = row
            return self.rows[place]

    def _read(self, place: Place, overtaken: Overtaken) -> Row | None:
        """Read a point, and explain its result while it is at hand."""
        reader = _Reader(self.base.read, overtaken)
        row = read_point(replace(self.base, read=reader), self.grid.values(place))
        if reader.stopped:
            return None
        self._sentences[place] = [] if row.problem else reader.sentences
        return row

    def _commit(self, place: Place, row: Row) -> None:
        key = self._key(place) if self._store is not None and row.lasting else None
        if self._store is not None and key is not None:
            store = Store(self._store)
            store.add([(key, row)])
            store.close()

    def most(self, place: Place) -> float | None:
        """The bound of a point [output tokens/s]; None if it is not known."""
        for rows in (self.rows, self.bounds):
            if place in rows and "bound_gen_tok_s" in rows[place].numbers:
                return rows[place].numbers["bound_gen_tok_s"]
        return None

    def point(self, place: Place) -> Point:
        """A point, which is read if it is not there."""
        self.read(place)
        return Point.of(self.base, self.grid, place, self.rows[place])

    def explain(self, place: Place, overtaken: Overtaken = never) -> None:
        """Explain the result of a point, which is read if it is not there; read elsewhere, it is read again for it."""
        if place in self._sentences:
            return
        row = self.read(place, overtaken)
        if row is None or place in self._sentences:
            return
        if row.problem:
            self._sentences[place] = []
        elif row.result is not None:
            point = Point.of(self.base, self.grid, place, row)
            self._sentences[place] = _sentences(point.scenario, point.schedule, point.result)
        else:
            self._read(place, overtaken)

    def explained(self, place: Place) -> list[str] | None:
        """The explanation, if there is one already."""
        return self._sentences.get(place)

    def part(self, points: Matrix) -> Sweep:
        """The sweep of some points, of which those that are missing stand aside."""
        flat = [place for row in points for place in row]
        if self.grid.zipped:
            return Sweep.of(self.base, self.grid, {place: self._row(place) for place in self.grid.places()})
        kept = [sorted(set(along)) for along in zip(*flat, strict=True)]
        cut = Grid(tuple(_cut(axis, places) for axis, places in zip(self.grid.axes, kept, strict=True)))
        inside = dict(zip(cut.places(), product(*kept), strict=True))
        return Sweep.of(self.base, cut, {place: self._row(whole) for place, whole in inside.items()})

    def _row(self, place: Place) -> Row:
        return self.rows.get(place, Row({}, "not read yet", lasting=False))


def _cut(axis: Axis, places: Sequence[int]) -> Axis:
    """Some of the values of an axis."""
    return replace(axis, values=tuple(axis.values[at] for at in places), labels=tuple(axis.labels[at] for at in places))


class _Reader:
    """A reader that explains its result; a simulation ends when it is overtaken."""

    def __init__(self, read: Reader, overtaken: Overtaken) -> None:
        self._read = partial(simulate, until=overtaken) if read is simulate else read
        self.stopped = False
        self.sentences: list[str] = []

    def __call__(self, scenario: Scenario, schedule: Schedule) -> Result:
        result = self._read(scenario, schedule)
        self.stopped = result.stopped
        if not result.stopped:
            self.sentences = _sentences(scenario, schedule, result)
        return result


def _sentences(scenario: Scenario, schedule: Schedule, result: Result) -> list[str]:
    most = [] if result.source is Source.BOUND else [bound(scenario, schedule)]
    return explain([*most, result])
