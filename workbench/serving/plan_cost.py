"""Tasks of a plan priced and played together: cores and memory that the lanes share slow them down."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from workbench.core.errors import ScenarioError
from workbench.core.timeline import overlap, tasks_during
from workbench.hardware import Machine
from workbench.hardware.profile import Contention, Cores, Pace
from workbench.schedules.plan import COMPUTE, LANES, Carry, Plan, Task, Turns, busy_seconds, one_at_a_time, play
from workbench.serving.task_cost import Price, Pricer, TaskCost
from workbench.stages import CutRows, PartRows, Rows

# Where the longest task of a plan is shorter, a team of threads gains nothing, and beside another program its members
# wait for one another: regions of 1 ms then took up to 50 ms (2 Zen 4 cores).
TEAM_SECONDS = 1e-3
_ROUNDS = 2
"""So often the lanes' overlap is worked out: lanes that slow one another down overlap longer."""
_PACKET = 1e-3  # seconds of a transfer's packets where it only matters how far lanes overlap
_NO_ROWS = Rows()


class LaidOut(NamedTuple):
    """Tasks on their lanes: start and end of each, 0 where it was skipped, and how long each lane was held [s].

    `dram` is what all of them take of the host's memory. `seconds` is the end of the last task that the iteration
    waits for, `runs_on` that of the transfer that may outlast it, or 0.
    """

    starts: list[float]
    ends: list[float]
    busy: dict[str, float]
    dram: float
    seconds: float
    runs_on: float


class _Kind(NamedTuple):
    """Tasks of a plan that cost the same: of one part, at places of the stack that see the same rows."""

    part: int | None
    place: int
    lane: str
    price: Pricer


class _Kinds(NamedTuple):
    """The tasks of a plan by what they cost: every kind, and which of them each task is. `tasks` are kept for their id.

    `on_host` has the kinds that the CPU computes, `order` the tasks' turns.
    `rest` are the kinds of the transfer that the iteration before let run on, `on` the places of that which this does.
    """

    kinds: list[_Kind]
    of_task: list[int]
    on_host: list[int]
    rest: list[int]
    on: list[int]
    order: Turns
    tasks: Sequence[Task]

    @property
    def lanes(self) -> list[str]:
        """The lane of every kind."""
        return [kind.lane for kind in self.kinds]


class _Beside(NamedTuple):
    """Share of a compute lane's time in which the other one works too, and tasks of other lanes per second of it."""

    share: float
    tasks_per_second: float


class PlanCost:
    """Prices and plays the plans of one scenario."""

    def __init__(self, cost: TaskCost, machine: Machine) -> None:
        self._cost = cost
        self._machine = machine
        self._profile = cost.profile
        self._kinds: dict[tuple[int, range | None, int, int], _Kinds] = {}

    def between(self, plan: Plan) -> float:
        """Seconds between a plan and the next [s]."""
        profile = self._profile
        if profile is None:
            return 0.0
        return profile.iteration + profile.request * sum(map(len, plan.parts)) + profile.task * len(plan.tasks)

    def tasks(self, tasks: Sequence[Task], parts: Sequence[PartRows], pace: Pace | None = None) -> list[float]:
        """Seconds of every task of a plan whose parts have these rows; none for the rest of a carried transfer."""
        kinds = self._sorted(tasks, parts, pace)
        seconds = [seconds for seconds, _ in _prices(kinds, parts)]
        return [seconds[kind] for kind in kinds.of_task]

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
        """Play tasks of a plan at its pace, or where devices share nothing but DRAM without one; see `plan.play`.

        The transfer that the iteration before let run on takes `carried` seconds yet.
        """
        kinds = self._sorted(tasks, parts, pace)
        prices = _prices(kinds, parts)
        work = [seconds for seconds, _ in prices]
        slowdowns = [0.0] * len(prices)
        dram = 0.0
        for kind in kinds.rest:
            work[kind] = carried
        if pace is None:
            bandwidth = self._machine.cpu.bandwidth
            dram = (
                sum([size * count for (_, size), (_, count) in zip(prices, kinds.order.kinds, strict=True)]) / bandwidth
            )
            for kind in kinds.on_host:
                slowdowns[kind] = self._slowdown(*prices[kind])
        else:
            work = pace.contention.stretch(work, kinds.lanes)
            of_lane = {"gpu": pace.gpu_slowdown, "cpu": pace.cpu_slowdown}
            slowdowns = [of_lane.get(kind.lane, 0.0) for kind in kinds.kinds]
        cold = 0.0 if pace is None or self._profile is None else self._profile.rest
        starts, ends, busy = play(kinds.order, work, packet, slowdowns, cold=cold, skip=skip)
        if not kinds.on:
            return LaidOut(starts, ends, busy, dram, max(ends), 0.0)
        awaited = ends.copy()
        for place in kinds.on:
            awaited[place] = 0.0
        return LaidOut(starts, ends, busy, dram, max(awaited), max(ends[place] for place in kinds.on))

    def _slowdown(self, seconds: float, size: float) -> float:
        """The share of its progress that a task on the host loses while weights are read from the same DRAM.

        A task that needs the share u of the bandwidth runs at min(1, a / u), a being what the stream leaves, at least
        half: the two then share evenly.
        """
        bandwidth = self._machine.cpu.bandwidth
        left = max(1.0 - self._machine.link.h2d / bandwidth, 0.5)
        return max(0.0, 1.0 - left * seconds * bandwidth / size) if size else 0.0

    # ------------------------------------------------------------------------------------------------- shared cores

    def pace(self, tasks: Sequence[Task], parts: Sequence[PartRows], cores: Cores) -> Pace:
        """Slowdowns of the lanes during a plan on shared cores.

        Where compute tasks follow one another and gain by it, each has all cores, the movers' among them.
        Else each lane has its own, and the movers sit with the one that has less to do.
        """
        try:
            crowded = self.tasks(tasks, parts, Pace(cores.gpu, cores.cpu, "", 0.0, 0.0))
        except ScenarioError:  # an operation that declares no work can still run
            crowded = [1.0] * len(tasks)
        link = self._machine.link.h2d
        stolen = cores.stolen(link)
        slowdowns = (cores.gpu_slowdown, cores.cpu_slowdown, cores.gpu_team_slowdown, cores.cpu_team_slowdown)
        lost = [1 - 1 / (1 + slowdown * link) for slowdown in slowdowns]
        gpu_slowdown, cpu_slowdown, gpu_team_slowdown, cpu_team_slowdown = lost
        whole = Pace(cores.alone, cores.alone, "", gpu_team_slowdown, cpu_team_slowdown)
        alternate = one_at_a_time(tasks, crowded)
        if alternate and self._faster(tasks, parts, whole, crowded):
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
            Contention() if alternate else self._contention(tasks, parts, cores),
        )

    def _contention(self, tasks: Sequence[Task], parts: Sequence[PartRows], cores: Cores) -> Contention:
        """Slowdown of each compute lane in a plan by what runs on other lanes while it works."""
        found = None if self._profile is None else self._profile.contention
        if found is None or found == Contention():
            return Contention()
        kinds = self._sorted(tasks, parts, Pace(cores.gpu, cores.cpu, "", 0.0, 0.0))
        alone = [length for length, _ in _prices(kinds, parts)]
        slower = Contention()
        for _ in range(_ROUNDS):
            gpu, cpu = _beside(tasks, kinds, slower.stretch(alone, kinds.lanes))
            gpu_growth = gpu.share * found.gpu + gpu.tasks_per_second * found.gpu_wait
            cpu_growth = cpu.share * found.cpu + cpu.tasks_per_second * found.cpu_wait
            slower = Contention(gpu_growth, cpu_growth)
        return slower

    def _faster(self, tasks: Sequence[Task], parts: Sequence[PartRows], whole: Pace, crowded: Sequence[float]) -> bool:
        """True if compute tasks that have every core end sooner than those with their lane's own."""
        apart = _compute(tasks, crowded)
        if max(apart) < TEAM_SECONDS:
            return False
        return self._profile is None or sum(_compute(tasks, self.tasks(tasks, parts, whole))) < sum(apart)

    # -------------------------------------------------------------------------------------------- what costs the same

    def _sorted(self, tasks: Sequence[Task], parts: Sequence[PartRows], pace: Pace | None) -> _Kinds:
        """The kinds of a plan's tasks, found once for each way in which prefills pass the layers."""
        cut = next((rows for rows in parts if isinstance(rows, CutRows)), None)
        threads = (0, 0) if pace is None else (pace.gpu, pace.cpu)
        key = (id(tasks), None if cut is None else cut.layers, *threads)
        if key not in self._kinds:
            self._kinds[key] = self._sort(tasks, cut, *threads)
        return self._kinds[key]

    def _sort(self, tasks: Sequence[Task], cut: CutRows | None, gpu: int, cpu: int) -> _Kinds:
        number: dict[tuple[object, ...], int] = {}
        kinds = list[_Kind]()
        of_task = list[int]()
        for task in tasks:
            place = 0 if cut is None else task.place(cut.stack)
            rows = None if cut is None or task.part is None else id(cut.at(place))
            size = self._cost.weight_transfer(task) if task.part is None else None
            key = (size, task.carry, id(task.node), task.part, rows)
            if key not in number:
                number[key] = len(kinds)
                lane = task.node.lane
                kinds.append(_Kind(task.part, place, lane, self._pricer(task, cpu if lane == "cpu" else gpu)))
            of_task.append(number[key])
        on_host = [number for number, kind in enumerate(kinds) if kind.lane == "cpu"]
        rest = [kind for task, kind in zip(tasks, of_task, strict=True) if task.carry is Carry.IN]
        on = [place for place, task in enumerate(tasks) if task.carry is Carry.OUT]
        return _Kinds(kinds, of_task, on_host, rest, on, Turns.of(tasks, of_task), tasks)

    def _pricer(self, task: Task, threads: int) -> Pricer:
        if task.part is None:
            size = 0.0 if task.carry is Carry.IN else self._cost.weight_transfer(task)
            fixed = self._cost.fetch(size), size
            return lambda rows: fixed
        price = self._cost.pricer(task.node, threads)
        if not self._machine.cores or task.node.lane not in COMPUTE:
            return price
        dispatch = self._machine.link.overhead if self._profile is None else self._profile.dispatch

        def dispatched(rows: Rows) -> Price:
            length, size = price(rows)
            return length + dispatch if length else length, size

        return dispatched


def _prices(kinds: _Kinds, parts: Sequence[PartRows]) -> list[Price]:
    """The price of every kind."""
    return [price(_NO_ROWS if part is None else parts[part].at(place)) for part, place, _, price in kinds.kinds]


def _beside(tasks: Sequence[Task], kinds: _Kinds, seconds: Sequence[float]) -> tuple[_Beside, _Beside]:
    """How the other lanes work beside the gpu lane, and beside the cpu lane."""
    starts, ends, _ = play(kinds.order, seconds, _PACKET, [0.0] * len(seconds))
    spans = {lane: list[tuple[float, float]]() for lane in LANES}
    for task, start, end in zip(tasks, starts, ends, strict=True):
        if end > start:
            spans[task.node.lane].append((start, end))
    both = overlap(*(spans[lane] for lane in COMPUTE))
    found = list[_Beside]()
    for lane in COMPUTE:
        busy = sum(end - start for start, end in spans[lane])
        others = chain.from_iterable(spans[other] for other in LANES if other != lane)
        count = tasks_during(others, spans[lane])
        found.append(_Beside(both / busy, count / busy) if busy else _Beside(0.0, 0.0))
    gpu, cpu = found
    return gpu, cpu


def _compute(tasks: Sequence[Task], seconds: Sequence[float]) -> list[float]:
    return [length for task, length in zip(tasks, seconds, strict=True) if task.node.lane in COMPUTE]
