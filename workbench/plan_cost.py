"""Tasks of a plan priced and played together: cores and memory that the lanes share slow them down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.cost import CutRows, PartRows, Rows
from workbench.errors import ScenarioError
from workbench.hardware import Machine
from workbench.plan import COMPUTE, Carry, Plan, Task, Turns, busy_seconds, one_at_a_time, play
from workbench.profile import Contention, Cores, Pace
from workbench.task_cost import Price, Pricer, TaskCost
from workbench.timeline import overlap

# Where the longest task of a plan is shorter, a team of threads gains nothing, and beside another program its members
# wait for one another: regions of 1 ms then took up to 50 ms (2 Zen 4 cores).
TEAM_SECONDS = 1e-3
_MOST_STOLEN = 0.5  # share of a core that the movers take from a lane that wants it too
_PACKET = 1e-3  # seconds of a transfer's packets where it only matters how far lanes overlap
_NO_ROWS = Rows()


class LaidOut(NamedTuple):
    """Tasks on their lanes, one value for each: start, end, time that it holds its lane, time of the host's memory [s].

    `seconds` is the end of the last task that the iteration waits for, `runs_on` that of the transfer that may outlast
    it, and `running_on` how long that one takes, or 0.
    """

    starts: list[float]
    ends: list[float]
    busy: list[float]
    dram: list[float]
    seconds: float
    runs_on: float
    running_on: float


class _Kind(NamedTuple):
    """Tasks of a plan that cost the same: of one part, at places of the stack that see the same rows."""

    part: int | None
    place: int
    price: Pricer


class _Kinds(NamedTuple):
    """The tasks of a plan by what they cost: every kind, and which of them each task is. `tasks` are kept for their id.

    `on_host` are the kinds that the CPU computes, `order` the tasks' turns.
    `rest` and `on` are the places of the transfer that the iteration before let run on, and of the one that this does.
    """

    kinds: list[_Kind]
    of_task: list[int]
    on_host: list[int]
    rest: list[int]
    on: list[int]
    order: Turns
    tasks: Sequence[Task]

    def each(self, of_kind: list[float]) -> list[float]:
        """A value for every task, given those of the kinds."""
        return list(map(of_kind.__getitem__, self.of_task))


class PlanCost:
    """Prices and plays the plans of one scenario."""

    def __init__(self, cost: TaskCost, machine: Machine) -> None:
        self._cost, self._machine, self._profile = cost, machine, cost.profile
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
        return kinds.each([seconds for seconds, _ in _prices(kinds, parts)])

    def lay_out(
        self, tasks: Sequence[Task], parts: Sequence[PartRows], packet: float, pace: Pace | None, carried: float
    ) -> LaidOut:
        """Play tasks of a plan at its pace, or where devices share nothing but DRAM without one; see `plan.lay_out`.

        The transfer that the iteration before let run on takes `carried` seconds yet.
        """
        kinds = self._sorted(tasks, parts, pace)
        prices = _prices(kinds, parts)
        work = kinds.each([seconds for seconds, _ in prices])
        for place in kinds.rest:
            work[place] = carried
        if pace is None:
            drags, dram = self._shared_dram(kinds, prices)
        else:
            work = _contending(work, tasks, pace.contention)
            of_lane = {"gpu": pace.gpu_drag, "cpu": pace.cpu_drag}
            drags, dram = [of_lane.get(task.node.lane, 0.0) for task in tasks], [0.0] * len(tasks)
        cold = 0.0 if pace is None or self._profile is None else self._profile.rest
        starts, ends, busy = play(kinds.order, work, packet, drags, cold)
        awaited, runs_on, running_on = ends, 0.0, 0.0
        if kinds.on:
            awaited = ends.copy()
            for place in kinds.on:
                awaited[place], runs_on, running_on = 0.0, max(runs_on, ends[place]), running_on + busy[place]
        return LaidOut(starts, ends, busy, dram, max(awaited), runs_on, running_on)

    def _shared_dram(self, kinds: _Kinds, prices: Sequence[Price]) -> tuple[list[float], list[float]]:
        """What tasks do to one another in the host's memory: drag, and seconds of the bandwidth that each takes.

        A drag is the share of its progress that a task on the host loses while weights are read from the same DRAM.
        A task that needs the share u of the bandwidth runs at min(1, a / u), a being what the stream leaves, at least
        half: the two then share evenly.
        """
        bandwidth = self._machine.cpu.bandwidth
        left = max(1.0 - self._machine.link.h2d / bandwidth, 0.5)
        dram = [size / bandwidth for _, size in prices]
        drags = [0.0] * len(dram)
        for kind in kinds.on_host:
            if dram[kind]:
                drags[kind] = max(0.0, 1.0 - left * prices[kind][0] / dram[kind])
        return kinds.each(drags), kinds.each(dram)

    # ------------------------------------------------------------------------------------------------- shared cores

    def pace(self, tasks: Sequence[Task], parts: Sequence[PartRows], cores: Cores) -> Pace:
        """How the lanes run during a plan on shared cores.

        Where compute tasks follow one another and gain by it, each has all cores, the movers' among them.
        Else each lane has its own, and the movers sit with the one that has less to do.
        """
        try:
            crowded = self.tasks(tasks, parts, Pace(cores.gpu, cores.cpu, "", 0.0, 0.0))
        except ScenarioError:  # an operation that declares no work can still run
            crowded = [1.0] * len(tasks)
        link = self._machine.link.h2d
        stolen = 0.0 if cores.spare else min(cores.mover * link, _MOST_STOLEN)
        drags = (cores.gpu_drag, cores.cpu_drag, cores.gpu_team_drag, cores.cpu_team_drag)
        gpu_drag, cpu_drag, gpu_team_drag, cpu_team_drag = (1 - 1 / (1 + drag * link) for drag in drags)
        whole = Pace(cores.alone, cores.alone, "", gpu_team_drag, cpu_team_drag)
        alternate = one_at_a_time(tasks, crowded)
        if alternate and self._faster(tasks, parts, whole, crowded):
            return whole
        busy = busy_seconds(tasks, crowded)
        beside = "gpu" if busy["gpu"] < busy["cpu"] else "cpu"
        if beside == "gpu":
            gpu_drag = 1 - (1 - gpu_drag) * (1 - stolen)
        else:
            cpu_drag = 1 - (1 - cpu_drag) * (1 - stolen)
        seats = cores.gpu, cores.cpu, "" if cores.spare else beside
        return Pace(*seats, gpu_drag, cpu_drag, Contention() if alternate else self._contention(tasks, crowded))

    def _contention(self, tasks: Sequence[Task], seconds: Sequence[float]) -> Contention:
        """What the lanes do to one another in a plan, for the share of each one's time in which both work."""
        found = None if self._profile is None else self._profile.contention
        if found is None or found == Contention():
            return Contention()
        starts, ends, _ = play(Turns.of(tasks), seconds, _PACKET, [0.0] * len(tasks))
        spans = {lane: list[tuple[float, float]]() for lane in COMPUTE}
        for task, start, end in zip(tasks, starts, ends, strict=True):
            if end > start and task.node.lane in spans:
                spans[task.node.lane].append((start, end))
        gpu, cpu = (sum(end - start for start, end in spans[lane]) for lane in COMPUTE)
        both = overlap(*spans.values())
        gpu, cpu = (both / busy if busy else 0.0 for busy in (gpu, cpu))
        return Contention(gpu * found.gpu, cpu * found.cpu)

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
        kinds, of_task, on_host = list[_Kind](), list[int](), list[int]()
        for task in tasks:
            place = 0 if cut is None else task.place(cut.stack)
            rows = None if cut is None or task.part is None else id(cut.at(place))
            key = (task.pieces, task.carry, task.page, id(task.node), task.part, rows)
            if key not in number:
                number[key] = len(kinds)
                if task.node.lane == "cpu":
                    on_host.append(len(kinds))
                kinds.append(_Kind(task.part, place, self._pricer(task, cpu if task.node.lane == "cpu" else gpu)))
            of_task.append(number[key])
        rest, on = ([i for i, task in enumerate(tasks) if task.carry is carry] for carry in (Carry.IN, Carry.OUT))
        return _Kinds(kinds, of_task, on_host, rest, on, Turns.of(tasks), tasks)

    def _pricer(self, task: Task, threads: int) -> Pricer:
        if task.part is None:
            size = 0.0 if task.carry is Carry.IN else self._cost.weight_transfer(task)
            fixed = self._cost.fetch(size), size
            return lambda rows: fixed
        price = self._cost.pricer(task.node, threads)
        if not self._machine.cores or task.node.lane not in COMPUTE:
            return price
        hand_over = self._machine.link.overhead if self._profile is None else self._profile.hand_over

        def handed_over(rows: Rows) -> Price:
            length, size = price(rows)
            return length + hand_over if length else length, size

        return handed_over


def _prices(kinds: _Kinds, parts: Sequence[PartRows]) -> list[Price]:
    """The price of every kind."""
    return [price(_NO_ROWS if part is None else parts[part].at(place)) for part, place, price in kinds.kinds]


def _contending(seconds: Sequence[float], tasks: Sequence[Task], contention: Contention) -> list[float]:
    """Seconds of tasks whose lanes contend."""
    factors = {"gpu": 1 + contention.gpu, "cpu": 1 + contention.cpu}
    return [length * factors.get(task.node.lane, 1.0) for length, task in zip(seconds, tasks, strict=True)]


def _compute(tasks: Sequence[Task], seconds: Sequence[float]) -> list[float]:
    return [length for task, length in zip(tasks, seconds, strict=True) if task.node.lane in COMPUTE]
