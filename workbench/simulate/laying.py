"""Plans of one scenario, priced and played by the compiled kernels; see `workbench.simulate.kernels`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.schedules.plan import LANES, Task
from workbench.serving.plan_cost import CostGroups, LaidOut, PlanCost
from workbench.serving.task_cost import TaskCost
from workbench.simulate.kernels.fields import DONE, LIMIT, READ
from workbench.simulate.kernels.order import Order
from workbench.simulate.loading import Kernels
from workbench.simulate.tapes import Tape, UntraceableError, record
from workbench.stages import PartRows, Rows

_COUNTS = len(Rows())
_NO_ROWS = (0.0,) * _COUNTS
Read = Callable[[Sequence[Any]], Sequence[Any]]
_GIVEN = -1
"""Family of a group that no tape prices."""
_KEPT = 64
"""Prices whose tapes, and plans whose order, are kept for other simulations."""


class _Shape(NamedTuple):
    """A plan's groups in the arrays that the kernel takes, and the arrays that it writes.

    Attributes
    ----------
    groups : CostGroups
    order : tuple of ndarray
        See `kernels.order.Order`.
    table : ndarray (groups, 3) int64
        See `kernels.layout.lay_out`.
    runs_on : ndarray int64
    sets : list of (part, place)
        Rows that are priced, in the order in which the kernel gets them; empty if each part has the same rows at every
        place, and these are given part after part.
    given : list of int
        Groups that Python prices for each iteration.
    tapes : _Tapes
    prices, starts, ends, busy, told, before : ndarray
        Written by the kernel.
    """

    groups: CostGroups
    order: tuple[npt.NDArray[np.int64], ...]
    table: npt.NDArray[np.int64]
    runs_on: npt.NDArray[np.int64]
    sets: list[tuple[int, int]]
    given: list[int]
    tapes: _Tapes
    prices: npt.NDArray[np.float64]
    starts: npt.NDArray[np.float64]
    ends: npt.NDArray[np.float64]
    busy: npt.NDArray[np.float64]
    told: npt.NDArray[np.float64]
    before: npt.NDArray[np.int64]


class Laying:
    """Lays out the plans of one scenario whose lanes share no cores."""

    def __init__(self, kernels: Kernels, plans: PlanCost, packet: float, bandwidth: float, *, skip: bool) -> None:
        self._kernels = kernels
        self._plans = plans
        self._packet = float(packet)
        self._bandwidth = float(bandwidth)
        self._skip = skip
        self._shapes = dict[tuple[int, bool], _Shape]()
        self._own = _Tapes()
        self._reads = True

    def lay_out(self, tasks: Sequence[Task], parts: Sequence[PartRows], carried: float) -> LaidOut:
        """Play the tasks of a plan; see `PlanCost.lay_out`."""
        groups = self._plans.groups(tasks, parts)
        plain = not any(type(rows) is not Rows for rows in parts)
        shape = self._shapes.get((id(groups), plain))
        if shape is None:
            shape = self._shapes[id(groups), plain] = self._shape(groups, plain=plain)
        flat = list[float]()
        if plain:
            for part in range(len(parts)):
                flat += parts[part].at(0)
        else:
            for part, place in shape.sets:
                flat += parts[part].at(place)
        for group in shape.given:
            shape.prices[group] = self._given(shape, group, parts)
        counts = np.array(flat or _NO_ROWS, dtype=np.float64)
        while True:
            missing = self._kernels.lay_out(
                shape.order,
                *shape.tapes.now,
                shape.table,
                shape.runs_on,
                counts,
                shape.prices,
                carried,
                self._bandwidth,
                self._packet,
                self._skip,
                shape.starts,
                shape.ends,
                shape.busy,
                shape.told,
                shape.before,
            )
            if missing < 0:
                break
            self._add(shape, missing, parts)
        dram, seconds, runs_on = shape.told.tolist()
        busy = dict(zip(LANES, shape.busy.tolist(), strict=True))
        if self._skip:
            return LaidOut([], [], busy, dram, seconds, runs_on)
        return LaidOut(shape.starts, shape.ends, busy, dram, seconds, runs_on, shape.before)

    def prices_all(self, tasks: Sequence[Task]) -> bool:
        """True if so far tapes price all groups of these tasks, and give the bytes of experts."""
        return self._reads and not self._plain_shape(tasks).given

    def advance(
        self, tasks: Sequence[Task], parts: int, read: Read, state: Sequence[Any], written: Sequence[Any]
    ) -> None:
        """Run iterations with these tasks, see `kernels.stretch.advance`.

        `read` gives the bytes of experts for all counts of rows. If no tape repeats it, or a group's price, the
        iteration under way is the last.
        """
        shape = self._plain_shape(tasks)
        reading = shape.tapes.family(("reading", parts))
        _, _, counts, reals, *_ = state
        rows = np.zeros(parts * _COUNTS)
        while True:
            missing = self._kernels.advance(
                shape.order,
                *shape.tapes.now,
                shape.table,
                shape.runs_on,
                shape.prices,
                self._bandwidth,
                self._packet,
                self._skip,
                *state,
                rows,
                *written,
                reading,
            )
            if missing < 0:
                return
            them = [Rows(*map(int, rows[first : first + _COUNTS])) for first in range(0, len(rows), _COUNTS)]
            if missing < len(shape.table):
                self._add(shape, missing, them)
                if shape.given:
                    counts[LIMIT] = counts[DONE] + 1
                continue
            every = [count for each in them for count in each]
            try:
                shape.tapes.add(reading, record(read, every))
            except UntraceableError:
                reading = _GIVEN
                self._reads = False
                reals[READ] = read(every)[0]
                counts[LIMIT] = counts[DONE] + 1

    def _plain_shape(self, tasks: Sequence[Task]) -> _Shape:
        groups = self._plans.groups(tasks, ())
        shape = self._shapes.get((id(groups), True))
        if shape is None:
            shape = self._shapes[id(groups), True] = self._shape(groups, plain=True)
        return shape

    def _shape(self, groups: CostGroups, *, plain: bool) -> _Shape:
        """Make the arrays of a plan's groups."""
        count = len(groups.groups)
        varying = {number for number, _ in groups.varying}
        sets = list[tuple[int, int]]()
        table = np.zeros((count, 3), dtype=np.int64)
        prices = np.zeros((count, 3))
        tapes = self._own if varying else _tapes_of(self._plans.cost)
        given = list[int]()
        for number, (part, place, _, _, mark) in enumerate(groups.groups):
            family = _GIVEN
            base = 0
            if part is not None and plain:
                base = part * _COUNTS
            elif part is not None:
                if (part, place) not in sets:
                    sets.append((part, place))
                base = sets.index((part, place)) * _COUNTS
            if part is None and number not in varying:
                prices[number] = self._price(groups, number, Rows())
            elif part is not None:
                family = tapes.family(("group", mark))
            elif plain:
                family = tapes.family(("weights", id(groups), number))
            else:
                given.append(number)
            table[number] = (family, base, number in groups.rest)
        tasks = len(groups.tasks)
        return _Shape(
            groups,
            _order_of(groups),
            table,
            np.array(groups.runs_on, dtype=np.int64),
            sets,
            given,
            tapes,
            prices,
            np.zeros(tasks),
            np.zeros(tasks),
            np.zeros(len(LANES)),
            np.zeros(3),
            np.zeros(tasks, dtype=np.int64),
        )

    def _price(self, groups: CostGroups, number: int, rows: Any) -> tuple[Any, Any, Any]:
        """Seconds, bytes and slowdown of a group for these rows of its part."""
        group = groups.groups[number]
        seconds, size = group.price(rows)
        return seconds, size, self._plans.slowdown(seconds, size) if group.lane == "cpu" else 0.0

    def _given(self, shape: _Shape, number: int, parts: Sequence[PartRows]) -> tuple[Any, Any, Any]:
        """Seconds, bytes and slowdown of a group, whose size may depend on the rows of all parts."""
        for varying, of_weights in shape.groups.varying:
            if varying == number:
                return (*of_weights(parts), 0.0)
        part, place, *_ = shape.groups.groups[number]
        return self._price(shape.groups, number, Rows() if part is None else parts[part].at(place))

    def _add(self, shape: _Shape, number: int, parts: Sequence[PartRows]) -> None:
        """Record a tape for a group and these rows; where that cannot be done, Python prices it from now on."""
        part, place, *_ = shape.groups.groups[number]
        varies = any(number == varying for varying, _ in shape.groups.varying)
        them: Sequence[Any] = (parts if varies else ()) if part is None else [parts[part].at(place)]
        inputs = [count for rows in them for count in rows]

        def priced(counts: Sequence[Any]) -> Sequence[Any]:
            traced = [Rows(*counts[first : first + _COUNTS]) for first in range(0, len(counts), _COUNTS)]
            return self._given(shape, number, traced) if part is None else self._price(shape.groups, number, traced[0])

        try:
            shape.tapes.add(int(shape.table[number, 0]), record(priced, inputs))
        except UntraceableError:
            shape.table[number, 0] = _GIVEN
            shape.given.append(number)
            shape.prices[number] = self._given(shape, number, parts)


class _Tapes:
    """Tapes in families; of a family the first that holds is played. Simulations in several threads may share them.

    Attributes
    ----------
    now : tuple
        What the kernels take, see `kernels.layout.lay_out`: the arrays of all tapes, and the first tape of each family.
        It is exchanged, and never changed.
    """

    def __init__(self) -> None:
        self._tapes = list[Tape]()
        self._follow = list[int]()
        self._families = dict[Hashable, int]()
        self._lock = Lock()
        self.now: tuple[tuple[npt.NDArray[Any], ...], npt.NDArray[np.int64]] = self._arrays(), _first_of([])

    def family(self, key: Hashable) -> int:
        """The number of a family, which is made if it is not there."""
        with self._lock:
            if key not in self._families:
                arrays, first_of = self.now
                self._families[key] = len(first_of)
                self.now = arrays, _first_of([*first_of.tolist(), -1])
            return self._families[key]

    def add(self, family: int, tape: Tape) -> None:
        """Add a tape in front of a family's others."""
        with self._lock:
            first_of = self.now[1].copy()
            self._follow.append(int(first_of[family]))
            first_of[family] = len(self._tapes)
            self._tapes.append(tape)
            self.now = self._arrays(), first_of

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        tapes = self._tapes
        steps = [step for tape in tapes for step in tape.steps]
        constants = [constant for tape in tapes for constant in tape.constants]
        rows = list[tuple[int, ...]]()
        most = max((tape.inputs + len(tape.constants) + len(tape.steps) for tape in tapes), default=0)
        step = 0
        constant = 0
        for tape in tapes:
            after = step + len(tape.steps)
            rows.append((step, after, constant, len(tape.constants), tape.inputs, *tape.answer, most))
            step = after
            constant += len(tape.constants)
        return (
            np.array(steps, dtype=np.int64).reshape(-1, 4),
            np.array(constants, dtype=np.float64),
            np.array(rows or [(0,) * 9], dtype=np.int64),
            np.array(self._follow, dtype=np.int64),
        )


def _first_of(tapes: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(tapes, dtype=np.int64)


@lru_cache(maxsize=_KEPT)
def _order_of(groups: CostGroups) -> tuple[npt.NDArray[np.int64], ...]:
    """The order of a plan's tasks in the arrays that the kernel takes."""
    return tuple(Order.of(groups.turns))


@lru_cache(maxsize=_KEPT)
def _tapes_of(cost: TaskCost) -> _Tapes:
    """Tapes of groups whose price depends on nothing but these prices and the rows of their part."""
    return _Tapes()
