"""WHEN: a plan is an ordered list of tasks on lanes, with what each waits for; and the rule by which lanes run it."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from workbench.core.display import escaped
from workbench.core.repeats import Run, find_runs
from workbench.core.timeline import ITERATION
from workbench.pipeline.layer_graph import LayerGraph, Node, NodeKind
from workbench.scheduler.batch import Batch

LANES = ("gpu", "cpu", "d2h", "h2d")


class Page(NamedTuple):
    """One of the `pages` equal shares in which a weight transfer is made, the first being number 0."""

    number: int = 0
    pages: int = 1

    def cut(self, size: float) -> tuple[float, float]:
        """Begin and end of the page in `size` bytes: whole multiples of 64 B, but the end of the last one."""
        begin, end = (size * edge // (64 * self.pages) * 64 for edge in (self.number, self.number + 1))
        return begin, size if self.number + 1 == self.pages else end


WHOLE = Page()


class Carry(enum.Enum):
    """True if a weight transfer keeps within its iteration."""

    NONE = "within"
    OUT = "runs on"
    """It begins here, and the iteration does not wait for its end."""
    IN = "the rest"
    """The end of the one that the iteration before let run on."""


@dataclass(frozen=True)
class Task:
    """A node at one layer and part.

    Attributes
    ----------
    node : Node
    layer : int
    part : int or None
        Micro-batch or partition; None for weights, which serve them all.
    after : tuple of int
        Tasks of the plan that must have ended, each earlier in the plan.
    pieces : tuple of (layer, node index)
        What a weight transfer brings: the weights of these nodes; none for the rest of one counted before.
    bulk : bool
        True if the transfer goes in packets and lets small ones pass in between.
    carry : Carry
        Where a weight transfer stands that outlasts its iteration.
    page : Page
        Which share of the pieces a weight transfer brings. Pages follow one another into one slot.
    """

    node: Node
    layer: int
    part: int | None
    after: tuple[int, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()
    bulk: bool = False
    carry: Carry = Carry.NONE
    page: Page = WHOLE

    @property
    def name(self) -> str:
        """``A0a``: node code, layer, part; ``W1.0``: page 0 of layer 1's weights."""
        layer = "" if self.layer < 0 else str(self.layer)
        page = f".{self.page.number}" if self.page.pages > 1 else ""
        return f"{self.node.code}{layer}{'' if self.part is None else part_name(self.part)}{page}"

    def place(self, layers: int) -> int:
        """Position in the stack: the layer, -1 before the first, `layers` after the last."""
        after = self.node.kind is NodeKind.HEAD or self.node.lane == "h2d"
        return self.layer if self.layer >= 0 else layers if after else -1


def part_name(part: int) -> str:
    """a, b, ... z, then p26, p27, ..."""
    return chr(ord("a") + part) if part < 26 else f"p{part}"


@dataclass(frozen=True, eq=False)
class Plan:
    """One iteration: the parts of its batch and the tasks that take them through every layer.

    Tasks are in issue order: each lane runs its own in this order, and waits for a first one that is not ready.
    """

    schedule: str
    graph: LayerGraph
    layers: int
    parts: tuple[Batch, ...]
    tasks: tuple[Task, ...] = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and (self.schedule, self.layers, self.parts, self.tasks) == (
            other.schedule,
            other.layers,
            other.parts,
            other.tasks,
        )

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        parts = [f"  {part_name(index)}  {part.describe()}" for index, part in enumerate(self.parts)]
        nodes = [f"  {node.code}  {node.lane:4}{node.describe()}" for node in self.graph.all_nodes]
        tasks = [f"  {index:3}  {task.node.lane:4}{self._line(task)}" for index, task in enumerate(self.tasks)]
        head = f"{self.schedule}: {self.layers} layers, {len(self.parts)} parts, {len(self.tasks)} tasks"
        return "\n".join(
            [head, "parts", *parts, "nodes", *nodes, "tasks", *tasks, "lanes if every task took one unit", self.chart()]
        )

    def _line(self, task: Task) -> str:
        pieces = " ".join(f"{self.graph.nodes[node].code}{layer}" for layer, node in task.pieces)
        waits = " ".join(self.tasks[index].name for index in task.after)
        what = f"{task.name:5}{f'for {pieces} ':12}" if pieces else f"{task.name:17}"
        carry = {Carry.NONE: "", Carry.OUT: ", runs on", Carry.IN: " (runs since the iteration before)"}[task.carry]
        return f"{what}after {waits or '-'}{carry}"

    def chart(self) -> str:
        """Lane chart: one column per unit of time, every task one unit long."""
        starts, ends = lay_out(self.tasks, [1.0] * len(self.tasks))
        width = max(len(task.name) for task in self.tasks) + 1
        lines = []
        for lane in LANES:
            cells = [""] * int(max(ends))
            for task, start in zip(self.tasks, starts, strict=True):
                if task.node.lane == lane:
                    cells[int(start)] = task.name
            if any(cells):
                lines.append(f"  {lane:4}" + "".join((cell or ".").ljust(width) for cell in cells).rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escaped(str(self))}</pre>"


COMPUTE = ("gpu", "cpu")


def one_at_a_time(tasks: Sequence[Task], seconds: Sequence[float]) -> bool:
    """True if every compute task that has work waits, directly or not, for the one before it in the plan."""
    before = [0] * len(tasks)  # how many compute tasks, counted from the first, have ended when this one starts
    count = 0
    done = [0] * len(tasks)
    for index, task in enumerate(tasks):
        before[index] = max((done[other] for other in task.after), default=0)
        done[index] = before[index]
        if task.node.lane in COMPUTE and seconds[index]:
            if before[index] < count:
                return False
            count += 1
            done[index] = count
    return True


def lay_out(
    tasks: Sequence[Task],
    seconds: Sequence[float],
    packet: float = float("inf"),
    slowdowns: Sequence[float] = (),
) -> tuple[list[float], list[float]]:
    """Starts and ends of a plan's tasks when each lane runs its own in issue order [s].

    A task starts when its lane is free and everything it waits for has ended; a first task that is not ready blocks
    its lane. A bulk transfer goes in packets of `packet` seconds: a small transfer that becomes ready meanwhile
    starts at the next packet boundary and delays the rest. While a bulk transfer runs that stands in the plan before
    a task, the task makes only ``1 - slowdown`` seconds of progress per second; `slowdowns` has one
    for each task, or none.

    Notes
    -----
    Packets with priority are VSLPipe's. Small transfers must stand in the plan in the order in which they become ready,
    as they do in the schedules here.
    """
    played = play(Turns.of(tasks, range(len(tasks))), seconds, packet, slowdowns or [0.0] * len(tasks))
    return played.starts, played.ends


class Turns(NamedTuple):
    """The waits of a plan's tasks, found once for a plan that is played again and again.

    Attributes
    ----------
    tasks : list of (str, tuple of int, bool, int)
        Of each its lane, what it waits for, whether it is bulk, and its kind; tasks of a kind take as long.
    lanes : tuple of str
        Those of the tasks that are not bulk.
    kinds : list of (str, int)
        Of each kind the lane, and how many tasks there are.
    runs : list of (Run, lanes, int)
        Where tasks repeat: the lanes of those that are not bulk, and how many tasks back of the end of a repetition
        the later ones wait for.
    """

    tasks: list[tuple[str, tuple[int, ...], bool, int]]
    lanes: tuple[str, ...]
    kinds: list[tuple[str, int]]
    runs: list[tuple[Run, tuple[str, ...], int]]

    @classmethod
    def of(cls, tasks: Sequence[Task], kinds: Sequence[int]) -> Turns:
        """Make the turns of a plan's tasks, which are of these kinds."""
        turns = [(task.node.lane, task.after, task.bulk, kind) for task, kind in zip(tasks, kinds, strict=True)]
        like = []
        for place, (_, after, bulk, kind) in enumerate(turns):
            distances = tuple(place - index for index in after)
            like.append((kind, bulk, distances))
        runs = [(run, _lanes(turns[run.first : run.stop]), _reach(turns, run)) for run in find_runs(like)]
        lane_of = {kind: lane for lane, _, _, kind in turns}
        counts = Counter(kinds)
        return cls(turns, _lanes(turns), [(lane_of[kind], counts[kind]) for kind in sorted(counts)], runs)


def _lanes(turns: Sequence[tuple[str, tuple[int, ...], bool, int]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lane for lane, _, bulk, _ in turns if not bulk))


def _reach(turns: Sequence[tuple[str, tuple[int, ...], bool, int]], run: Run) -> int:
    """Tasks between a repetition's end and the earliest one that later tasks wait for; one repetition at least."""
    reach = run.length
    for place in range(run.first + run.length, len(turns)):
        for other in turns[place][1]:
            if run.first <= other < run.stop:
                reach = max(reach, min(place, run.stop) - other)
    return reach


class Played(NamedTuple):
    """Starts and ends of tasks, 0 of those that were skipped, and how long each lane is held by all [s]."""

    starts: list[float]
    ends: list[float]
    busy: dict[str, float]


RESTS = (2e-3, 5e-3)
"""Seconds without work from which on the gpu lane cools down, and after which it is all cold: others used its caches.

Between the two halves of a layer it waits for attention: their operations are timed after such a wait.
"""


def play(
    turns: Turns,
    seconds: Sequence[float],
    packet: float,
    slowdowns: Sequence[float],
    *,
    cold: float = 0.0,
    skip: bool = False,
) -> Played:
    """As `lay_out`, for the turns of a plan, and the seconds and slowdowns of its kinds.

    A task with which the gpu lane begins after a rest takes `cold` seconds longer, after a short one less.

    With `skip`, once a repetition of a run begins as the one before it did, all later ones are left out: each only
    shifts by the same time.
    """
    lanes = _Lanes(turns, seconds, packet, slowdowns, cold)
    for run, of_run, reach in turns.runs if skip else ():
        lanes.pass_run(run, of_run, reach)
    lanes.go_on(len(turns.tasks))
    busy = lanes.longer
    for (lane, count), length in zip(turns.kinds, seconds, strict=True):
        busy[lane] += count * length
    return Played(lanes.starts, lanes.ends, busy)


class _Moving(NamedTuple):
    """A bulk transfer under way: its lane, how many tasks ago it stood, and its times since the last end."""

    lane: str
    back: int
    start: float
    end: float
    since: float


class _State(NamedTuple):
    """The state at the end of a repetition that decides when later tasks run.

    `ends` are those of the last tasks, `last` the very last; bulk transfers that have ended are left out. `longer` is
    by how much each lane has been held longer than its tasks take alone.
    """

    last: float
    ends: list[float]
    moving: list[_Moving]
    longer: dict[str, float]

    def like(self, before: _State, left: int) -> bool:
        """True if so many more repetitions, at this drift, stay within a thousandth of one's length."""
        if len(self.ends) != len(before.ends) or [each[:2] for each in self.moving] != [
            each[:2] for each in before.moving
        ]:
            return False
        shift = self.last - before.last
        apart = [end - other - shift for end, other in zip(self.ends, before.ends, strict=True)]
        for one, other in zip(self.moving, before.moving, strict=True):
            apart += [one.start - other.start, one.end - other.end, one.since - other.since]
        return max(map(abs, apart)) <= 1e-3 * shift / left


class _Lanes:
    """Lanes that run the tasks of a plan, up to the one numbered `at`."""

    def __init__(
        self, turns: Turns, seconds: Sequence[float], packet: float, slowdowns: Sequence[float], cold: float
    ) -> None:
        self.starts = [0.0] * len(turns.tasks)
        self.ends = [0.0] * len(turns.tasks)
        self.longer = dict.fromkeys(LANES, 0.0)
        self._free = dict.fromkeys(LANES, 0.0)
        self._turns = turns
        self._seconds = seconds
        self._packet = packet
        self._slowdowns = slowdowns
        self._bulk = dict[str, list[_Bulk]]()
        self._at = 0
        self._cold = cold

    def go_on(self, stop: int) -> None:
        """Run the tasks before `stop`."""
        starts = self.starts
        ends = self.ends
        free = self._free
        bulk = self._bulk
        seconds = self._seconds
        slowdowns = self._slowdowns
        lanes = self._turns.lanes
        packet = self._packet
        cold = self._cold
        for index, (lane, after, is_bulk, kind) in enumerate(self._turns.tasks[self._at : stop], self._at):
            length = seconds[kind]
            start = free[lane]
            for other in after:
                if ends[other] > start:
                    start = ends[other]
            if is_bulk:
                under_way = bulk.setdefault(lane, [])
                over = free[lanes[0]] if lanes else start  # none but bulk transfers begin before
                for each in lanes:
                    if free[each] < over:
                        over = free[each]
                while under_way and ends[under_way[0].index] <= over:
                    del under_way[0]
                if under_way and ends[under_way[-1].index] > start:
                    start = ends[under_way[-1].index]
                under_way.append(_Bulk(index, start))
                starts[index] = start
                ends[index] = start + length
                continue
            if cold and lane == "gpu" and length:
                slower = cold * min(1.0, max(0.0, (start - free[lane] - RESTS[0]) / (RESTS[1] - RESTS[0])))
                length += slower
                self.longer[lane] += slower
            if lane in bulk and length:
                start = _let_pass(bulk[lane], start, length, starts, ends, packet)
            end = start + length
            slowdown = slowdowns[kind]
            if slowdown and length:
                for each in bulk:
                    end = _slowed(bulk[each], start, end, starts, ends, slowdown)
                self.longer[lane] += end - start - length
            starts[index] = start
            ends[index] = free[lane] = end
        self._at = stop

    def pass_run(self, run: Run, lanes: Sequence[str], reach: int) -> None:
        """Run the repetitions of a run until one begins as that before it began, and skip the others."""
        self.go_on(run.first)
        before = self._state(lanes, reach)
        while (left := (run.stop - self._at) // run.length - 1) > 0:
            self.go_on(self._at + run.length)
            now = self._state(lanes, reach)
            if now.like(before, left):
                self._skip(run.length, left, now, before, lanes)
                return
            before = now

    def _state(self, lanes: Sequence[str], reach: int) -> _State:
        """The state after the tasks that have run; later tasks wait for the last `reach` of them at most."""
        at = self._at
        starts = self.starts
        ends = self.ends
        last = ends[at - 1] if at else 0.0
        over = min([self._free[lane] for lane in lanes], default=0.0)
        moving = [
            _Moving(lane, each.index - at, starts[each.index] - last, ends[each.index] - last, each.since - last)
            for lane, transfers in self._bulk.items()
            for each in transfers
            if ends[each.index] > over
        ]
        return _State(last, ends[max(0, at - reach) : at], moving, self.longer.copy())

    def _skip(self, tasks: int, times: int, now: _State, before: _State, lanes: Sequence[str]) -> None:
        """Stand where so many more repetitions of so many tasks lead to."""
        shift = (now.last - before.last) * times
        self._at += tasks * times
        self.ends[self._at - len(now.ends) : self._at] = [end + shift for end in now.ends]
        for lane in lanes:
            self._free[lane] += shift
            self.longer[lane] += (now.longer[lane] - before.longer[lane]) * times
        self._bulk = {lane: [] for lane in self._bulk}
        for lane, back, start, end, since in now.moving:
            index = self._at + back
            last = now.last + shift
            self.starts[index] = last + start
            self.ends[index] = last + end
            self._bulk[lane].append(_Bulk(index, last + since))


def _slowed(
    bulk: Sequence[_Bulk], start: float, end: float, starts: list[float], ends: list[float], slowdown: float
) -> float:
    """End of a task from `start` to `end` that bulk transfers slow down while they run beside it."""
    for transfer in bulk:
        begin = starts[transfer.index]
        until = ends[transfer.index]
        first = start if start > begin else begin
        last = end if end < until else until
        beside = last - first
        if beside > 0:
            slowed = beside / (1 - slowdown)
            room = until - first
            end += slowed - beside if slowed <= room else slowdown * room
    return end


def _let_pass(
    bulk: Sequence[_Bulk], start: float, length: float, starts: list[float], ends: list[float], packet: float
) -> float:
    """Start of a small transfer that is ready at `start`: it delays the bulk transfer under way and those behind it."""
    for transfer in bulk:
        begin = starts[transfer.index]
        end = ends[transfer.index]
        since = transfer.since
        if start >= end:
            continue
        if start <= begin:
            transfer.delay(start + length - begin, starts, ends)
            continue
        packets = -(-(start - since) // packet)
        if packets > 0:
            start = since + packets * packet
            start = start if start < end else end
        elif start < since:
            start = since
        if start < end:
            ends[transfer.index] += length
            transfer.since = start + length
    for before, behind in pairwise(bulk):
        if ends[before.index] > starts[behind.index]:
            behind.delay(ends[before.index] - starts[behind.index], starts, ends)
    return start


@dataclass(slots=True)
class _Bulk:
    """A bulk transfer under way: which task it is, and since when its packets have followed one another."""

    index: int
    since: float

    def delay(self, late: float, starts: list[float], ends: list[float]) -> None:
        """Begin so much later, if that is later at all."""
        if late > 0:
            starts[self.index] += late
            ends[self.index] += late
            self.since += late


def let_begin(tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float]) -> list[str]:
    """For each task of a plan the one whose end let it begin (``cpu C0a``), or `ITERATION` if none did.

    Of what it waits for, and what its lane did before it, that is the last to end. A task that took no time stands
    for the one that let it begin itself.
    """
    found = list[str]()
    before = dict[tuple[str, bool], int]()
    for index, task in enumerate(tasks):
        lane = task.node.lane
        last = -1
        lines = (False, True) if task.bulk else (False,)  # small transfers pass bulk ones
        held = (before[lane, bulk] for bulk in lines if (lane, bulk) in before)
        for other in (*task.after, *(other for other in held if ends[other] <= starts[index])):
            if last < 0 or ends[other] > ends[last]:
                last = other
        if last < 0:
            found.append(ITERATION)
        elif ends[last] > starts[last]:
            found.append(f"{tasks[last].node.lane} {tasks[last].name}")
        else:
            found.append(found[last])
        before[lane, task.bulk] = index
    return found


def busy_seconds(tasks: Sequence[Task], seconds: Sequence[float]) -> Mapping[str, float]:
    """Busy time per lane [s]."""
    total = dict.fromkeys(LANES, 0.0)
    for task, length in zip(tasks, seconds, strict=True):
        total[task.node.lane] += length
    return total
