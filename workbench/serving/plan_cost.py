"""Prices the tasks of a plan and plays them together: cores and memory that the lanes share slow them down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.errors import ScenarioError
from workbench.core.timeline import overlap, tasks_during
from workbench.hardware import Machine
from workbench.hardware.profile import Contention, Cores, Pace
from workbench.schedules.plan import COMPUTE, LANES, Carry, Page, Plan, Task, Turns, busy_seconds, one_at_a_time, play
from workbench.serving.task_cost import Price, Pricer, TaskCost
from workbench.stages import CutRows, PartRows, RowClass, Rows

# A plan whose longest task is shorter than this gains nothing from a team of threads. Beside another program the
# members of a team wait for one another: parallel regions of 1 ms then took up to 50 ms (2 Zen 4 cores).
TEAM_SECONDS = 1e-3
_ROUNDS = 2
"""Number of times that the lanes' overlap is computed: lanes that slow one another down overlap longer."""
_PACKET = 1e-3  # seconds of a transfer's packets where only the overlap of lanes is computed
_KEPT = 128
"""Plans whose groups are kept; `Overlap` makes another one for each typical batch."""
_NO_ROWS = Rows()
_WeightPricer = Callable[[Sequence[PartRows]], Price]


Times = Sequence[float] | npt.NDArray[np.float64]
Places = Sequence[int] | npt.NDArray[np.int64]


class LaidOut(NamedTuple):
    """A plan's tasks on their lanes.

    Attributes
    ----------
    starts, ends : sequence of float
        Start and end of each task, 0 if it was skipped [s]; empty where only their end is asked for.
    busy : mapping of lane to float
        Time for which tasks hold each lane [s].
    dram : float
        Time that the host's memory needs for all bytes that the tasks read and write there [s].
    seconds : float
        End of the last task that the iteration waits for [s].
    runs_on : float
        End of the transfer that may outlast the iteration, or 0 [s].
    before : sequence of int, optional
        See `plan.places_before`, where they are known.
    """

    starts: Times
    ends: Times
    busy: dict[str, float]
    dram: float
    seconds: float
    runs_on: float
    before: Places | None = None


class CostGroup(NamedTuple):
    """Tasks of a plan that cost the same: of one node and part, at places of the stack with the same rows.

    Groups with the same `mark` cost the same with equal rows; weight transfers have none.
    """

    part: int | None
    place: int
    lane: str
    price: Pricer
    mark: int | None


@dataclass(frozen=True, eq=False)
class CostGroups:
    """The tasks of a plan, grouped by what they cost.

    Attributes
    ----------
    groups : list of CostGroup
    of_task : list of int
        The group of each task.
    on_host : list of int
        Groups that the CPU computes.
    rest : list of int
        Group of the transfer that the iteration before let run on, if there is one.
    runs_on : list of int
        Place of the transfer that this iteration lets run on, if there is one.
    varying : list of (int, callable)
        Groups of weight transfers whose size depends on the rows of the parts, with the function that prices them.
    tasks : sequence of Task
        Kept so that their id stays theirs: it is the key under which the groups are stored.
    """

    groups: list[CostGroup]
    of_task: list[int]
    on_host: list[int]
    rest: list[int]
    runs_on: list[int]
    varying: list[tuple[int, _WeightPricer]]
    tasks: Sequence[Task]

    @cached_property
    def turns(self) -> Turns:
        """The order in which the tasks wait for one another."""
        return Turns.of(self.tasks, self.of_task)

    @property
    def lanes(self) -> list[str]:
        """The lane of every group."""
        return [group.lane for group in self.groups]

    def seconds(self, lane: str, prices: Sequence[float]) -> float:
        """Seconds of all tasks of a lane, where each of a group takes the group's price [s]."""
        counted = zip(self.turns.groups, prices, strict=True)
        return sum(price * count for (where, count), price in counted if where == lane)


class _Beside(NamedTuple):
    """Share of a compute lane's time in which the other one works too, and tasks of other lanes in all of its time."""

    share: float
    tasks: float


class _Sizes(NamedTuple):
    """Bytes of a weight transfer: all, those that each class of rows is computed with, and true if these are all."""

    whole: float
    of_classes: tuple[float, ...]
    alike: bool


class PlanCost:
    """Prices and plays the plans of scenarios whose tasks have the same prices, on one machine."""

    def __init__(self, cost: TaskCost, machine: Machine) -> None:
        self.cost = cost
        self._machine = machine
        self._profile = cost.profile
        self._groups: dict[tuple[int, range | None, int, int], CostGroups] = {}
        self._sizes: dict[tuple[tuple[tuple[int, int], ...], Page], _Sizes] = {}
        self._lock = Lock()

    def between(self, plan: Plan) -> float:
        """Time between the end of a plan and the start of the next [s]."""
        profile = self._profile
        if profile is None:
            return 0.0
        return profile.iteration + profile.request * sum(map(len, plan.parts)) + profile.task * len(plan.tasks)

    def tasks(self, tasks: Sequence[Task], parts: Sequence[PartRows], pace: Pace | None = None) -> list[float]:
        """Time of every task of a plan whose parts have these rows; 0 for the rest of a carried transfer [s]."""
        groups = self.groups(tasks, parts, pace)
        seconds = [seconds for seconds, _ in _prices(groups, parts)]
        return [seconds[group] for group in groups.of_task]

    def lay_out(
        self,
        tasks: Sequence[Task],
        parts: Sequence[PartRows],
        packet: float,
        pace: Pace | None,
        carried: float,
        *,
        skip: bool = False,
    ) -> LaidOut:
        """Play the tasks of a plan; see `plan.play`.

        Lanes without a pace share nothing but DRAM; the pace of lanes on a computer at hand has what was measured. The
        transfer that the iteration before let run on takes `carried` more seconds.
        """
        groups = self.groups(tasks, parts, pace)
        prices = _prices(groups, parts)
        work = [seconds for seconds, _ in prices]
        slowdowns = [0.0] * len(prices)
        dram = 0.0
        for group in groups.rest:
            work[group] = carried
        if pace is None or not pace.gpu:
            bandwidth = self._machine.cpu.bandwidth
            for (_, size), (_, count) in zip(prices, groups.turns.groups, strict=True):
                dram += size * count
            dram /= bandwidth
            for group in groups.on_host:
                slowdowns[group] = self.slowdown(*prices[group])
        if pace is not None:
            work = pace.contention.stretch(work, groups.lanes)
            of_lane = {"gpu": pace.gpu_slowdown, "cpu": pace.cpu_slowdown}
            of_group = [of_lane.get(group.lane, 0.0) for group in groups.groups]
            slowdowns = [max(both) for both in zip(slowdowns, of_group, strict=True)]
        cold = 0.0 if pace is None or self._profile is None else self._profile.rest
        starts, ends, busy = play(groups.turns, work, packet, slowdowns, cold=cold, skip=skip)
        if not groups.runs_on:
            return LaidOut(starts, ends, busy, dram, max(ends), 0.0)
        awaited = ends.copy()
        for place in groups.runs_on:
            awaited[place] = 0.0
        return LaidOut(starts, ends, busy, dram, max(awaited), max(ends[place] for place in groups.runs_on))

    def slowdown(self, seconds: float, size: float) -> float:
        """Share of its progress that a task on the host loses while weights are read from the same DRAM [1].

        A task that needs the share u of the bandwidth runs at min(1, a / u), where a is the share that the stream of
        weights leaves; it is at least a half, because task and stream then share evenly.
        """
        bandwidth = self._machine.cpu.bandwidth
        left = max(1.0 - self._machine.link.h2d / bandwidth, 0.5)
        return max(0.0, 1.0 - left * seconds * bandwidth / size) if size else 0.0

    # ------------------------------------------------------------------------------------------------- shared cores

    def pace(self, tasks: Sequence[Task], parts: Sequence[PartRows], cores: Cores) -> Pace:
        """Division of shared cores among the lanes during a plan, and the lanes' slowdowns.

        If the compute tasks follow one another and are faster so, each has all cores, those of the movers included.
        Otherwise each lane has its own cores, and the movers share those of the lane that has less to do. A card has
        none in any case.
        """
        try:
            crowded = self.tasks(tasks, parts, Pace(cores.gpu, cores.cpu, "", 0.0, 0.0))
        except ScenarioError:  # an operation that declares no work has no price, but can run
            crowded = [1.0] * len(tasks)
        link = self._machine.link.h2d
        stolen = cores.stolen(link)
        gpu_slowdown = _progress_lost(cores.gpu_slowdown, link)
        cpu_slowdown = _progress_lost(cores.cpu_slowdown, link)
        gpu_team_slowdown = _progress_lost(cores.gpu_team_slowdown, link)
        cpu_team_slowdown = _progress_lost(cores.cpu_team_slowdown, link)
        whole = Pace(cores.alone, cores.alone, "", gpu_team_slowdown, cpu_team_slowdown)
        if cores.gpu and one_at_a_time(tasks, crowded) and self._faster(tasks, parts, whole, crowded):
            return whole
        busy = busy_seconds(tasks, crowded)
        beside = "gpu" if busy["gpu"] < busy["cpu"] else "cpu"
        if beside == "gpu":
            gpu_slowdown = 1 - (1 - gpu_slowdown) * (1 - stolen)
        else:
            cpu_slowdown = 1 - (1 - cpu_slowdown) * (1 - stolen)
        beside = "" if cores.spare else beside
        return Pace(
            cores.gpu,
            cores.cpu,
            beside,
            gpu_slowdown,
            cpu_slowdown,
            self._contention(tasks, parts, cores),
        )

    def _contention(self, tasks: Sequence[Task], parts: Sequence[PartRows], cores: Cores) -> Contention:
        """Slowdown of each compute lane in a plan by what runs on other lanes while it works."""
        found = Contention() if self.cost.losses is None else self.cost.losses.contention
        if found == Contention():
            return found
        groups = self.groups(tasks, parts, Pace(cores.gpu, cores.cpu, "", 0.0, 0.0))
        alone = [length for length, _ in _prices(groups, parts)]
        slower = Contention()
        for _ in range(_ROUNDS):
            gpu, cpu = _beside(tasks, groups, slower.stretch(alone, groups.lanes))
            gpu_growth = gpu.share * found.gpu + _over(gpu.tasks * found.gpu_wait, groups.seconds("gpu", alone))
            cpu_growth = cpu.share * found.cpu + _over(cpu.tasks * found.cpu_wait, groups.seconds("cpu", alone))
            slower = Contention(gpu_growth, cpu_growth)
        return slower

    def _faster(self, tasks: Sequence[Task], parts: Sequence[PartRows], whole: Pace, crowded: Sequence[float]) -> bool:
        """True if the compute tasks end sooner with all cores each than with the cores of their lane."""
        apart = _compute(tasks, crowded)
        if max(apart) < TEAM_SECONDS:
            return False
        return self._profile is None or sum(_compute(tasks, self.tasks(tasks, parts, whole))) < sum(apart)

    # ----------------------------------------------------------------------------------- groups of tasks of one cost

    def groups(self, tasks: Sequence[Task], parts: Sequence[PartRows], pace: Pace | None = None) -> CostGroups:
        """The groups of a plan's tasks, found once for each range of layers that prefills pass."""
        cut = next((rows.cut for rows in parts if rows.cut is not None), None)
        threads = (0, 0) if pace is None else (pace.gpu, pace.cpu)
        key = (id(tasks), None if cut is None else cut.layers, *threads)
        found = self._groups.get(key)
        if found is None:
            found = self._sort(tasks, cut, *threads)
            with self._lock:
                self._groups[key] = found
                if len(self._groups) > _KEPT:
                    del self._groups[next(iter(self._groups))]
        return found

    def _sort(self, tasks: Sequence[Task], cut: CutRows | None, gpu: int, cpu: int) -> CostGroups:
        number: dict[tuple[object, ...], int] = {}
        keys = self._price_keys(tasks)
        groups = list[CostGroup]()
        varying = list[tuple[int, _WeightPricer]]()
        of_task = list[int]()
        for task in tasks:
            place = max(task.layer, 0) if cut is None else task.place(cut.stack)
            sizes = None
            key: tuple[object, ...]
            if task.part is None:
                sizes = self._sizes_of(task, cut)
                key = (keys[id(task.node)], sizes, task.carry)
            else:
                key = (keys[id(task.node)], task.part, None if cut is None else id(cut.at(place)))
            if key not in number:
                number[key] = len(groups)
                if sizes is not None and len(sizes) > 1:
                    varying.append((len(groups), partial(self._weight_price, task)))
                lane = task.node.lane
                pricer = self._pricer(task, cpu if lane == "cpu" else gpu)
                mark = None if task.part is None else keys[id(task.node)]
                groups.append(CostGroup(task.part, place, lane, pricer, mark))
            of_task.append(number[key])
        on_host = [number for number, group in enumerate(groups) if group.lane == "cpu"]
        rest = [group for task, group in zip(tasks, of_task, strict=True) if task.carry is Carry.IN]
        on = [place for place, task in enumerate(tasks) if task.carry is Carry.OUT]
        return CostGroups(groups, of_task, on_host, rest, on, varying, tasks)

    def _price_keys(self, tasks: Sequence[Task]) -> dict[int, int]:
        """A number for every node, by its id, that nodes share which cost the same with equal rows."""
        nodes = {id(task.node): task for task in tasks}
        found = {}
        for node, task in nodes.items():
            found[node] = self.cost.mark(task.node, max(task.layer, 0))
        return found

    def _sizes_of(self, task: Task, cut: CutRows | None) -> tuple[float, ...]:
        """The sizes that a weight transfer can have, one if it has the same for any rows; equal for equal transfers."""
        key = (task.weights_of, task.page)
        sizes = self._sizes.get(key) or self._sizes.setdefault(key, self._new_sizes(task))
        if task.for_next or task.carry is Carry.IN or (cut is None and sizes.alike):
            return (sizes.whole,)
        passed = () if cut is None else (layer in cut.layers for layer, _ in task.weights_of)
        return (sizes.whole, *sizes.of_classes, *passed)

    def _new_sizes(self, task: Task) -> _Sizes:
        """See `_sizes_of`."""
        whole = self.cost.weight_transfer(task)
        every, *some = (
            self.cost.exact_transfer(task.weights_of, rows) for rows in (RowClass.ALL, *RowClass.ALL.classes)
        )
        return _Sizes(whole, tuple(some), some == [every, every])

    def _weight_price(self, task: Task, parts: Sequence[PartRows]) -> Price:
        size = self.cost.weight_transfer(task, parts)
        return self.cost.fetch(size), size

    def _pricer(self, task: Task, threads: int) -> Pricer:
        if task.part is None:
            size = 0.0 if task.carry is Carry.IN else self.cost.weight_transfer(task)
            fixed = self.cost.fetch(size), size
            return lambda rows: fixed
        price = self.cost.pricer(task.node, threads, max(task.layer, 0))
        if not self._machine.cores or task.node.lane not in COMPUTE:
            return price
        dispatch = self._machine.link.overhead if self.cost.losses is None else self.cost.losses.dispatch

        def dispatched(rows: Rows) -> Price:
            length, size = price(rows)
            return length + dispatch if length else length, size

        return dispatched


def _prices(groups: CostGroups, parts: Sequence[PartRows]) -> list[Price]:
    """The price of every group."""
    found = [price(_NO_ROWS if part is None else parts[part].at(place)) for part, place, _, price, _ in groups.groups]
    for number, of_weights in groups.varying:
        found[number] = of_weights(parts)
    return found


def _progress_lost(slowdown: float, link: float) -> float:
    """Share of its progress that a lane loses beside a transfer of `link` B/s, which slows it by `slowdown` s/B [1]."""
    return 1 - 1 / (1 + slowdown * link)


def _over(part: float, whole: float) -> float:
    """A part over the whole, 0 where there is none."""
    return part / whole if whole else 0.0


def _beside(tasks: Sequence[Task], groups: CostGroups, seconds: Sequence[float]) -> tuple[_Beside, _Beside]:
    """Activity of the other lanes beside the gpu lane, and beside the cpu lane."""
    starts, ends, _ = play(groups.turns, seconds, _PACKET, [0.0] * len(seconds))
    spans = {lane: list[tuple[float, float]]() for lane in LANES}
    for task, start, end in zip(tasks, starts, ends, strict=True):
        if end > start:
            spans[task.node.lane].append((start, end))
    both = overlap(*(spans[lane] for lane in COMPUTE))
    found = list[_Beside]()
    for lane in COMPUTE:
        busy = sum(end - start for start, end in spans[lane])
        others = chain.from_iterable(spans[other] for other in LANES if other != lane)
        count = tasks_during(((span,) for span in others), spans[lane])
        found.append(_Beside(_over(both, busy), count))
    gpu, cpu = found
    return gpu, cpu


def _compute(tasks: Sequence[Task], seconds: Sequence[float]) -> list[float]:
    return [length for task, length in zip(tasks, seconds, strict=True) if task.node.lane in COMPUTE]
