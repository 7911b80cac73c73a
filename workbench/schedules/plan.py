"""Plans (WHEN): ordered lists of tasks with the tasks that each waits for, and the rule by which lanes run them."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from workbench.core.display import escaped
from workbench.core.timeline import ITERATION
from workbench.pipeline.layer_graph import Node, NodeKind
from workbench.pipeline.stack_graph import StackGraph
from workbench.scheduler.batch import Batch
from workbench.schedules.repeats import Repeat, find_repeats

LANES = ("gpu", "cpu", "d2h", "h2d")


class Page(NamedTuple):
    """One of the `pages` equal shares of a weight transfer; the first has number 0."""

    number: int = 0
    pages: int = 1

    def cut(self, size: float) -> tuple[float, float]:
        """Begin and end of the page in `size` bytes: multiples of 64 B, save for the end of the last page."""
        unit = 64 * self.pages
        begin = size * self.number // unit * 64
        end = size * (self.number + 1) // unit * 64
        return begin, size if self.number + 1 == self.pages else end


WHOLE = Page()


class Carry(enum.Enum):
    """Position of a weight transfer at the end of its iteration, which it may outlast."""

    NONE = "within"
    """It begins and ends within the iteration."""
    OUT = "runs on"
    """It begins in this iteration, which does not wait for its end."""
    IN = "the rest"
    """It is the rest of the transfer that the iteration before let run on."""


class Task(NamedTuple):
    """A node at one layer and part.

    Attributes
    ----------
    node : Node
    layer : int
        The layer; -1 for tasks before the first layer or after the last.
    part : int or None
        Number of the part in `Plan.parts`; None for weights, which serve them all.
    after : tuple of int
        Tasks of the plan that must have ended, each earlier in the plan.
    weights_of : tuple of (layer, node index)
        Nodes whose weights a weight transfer brings; empty for the rest of a transfer that began an iteration before.
    bulk : bool
        True if the transfer goes in packets and lets small ones pass in between.
    carry : Carry
        Position of a weight transfer that may outlast its iteration.
    page : Page
        Share of these weights that the transfer brings. Pages follow one another into one slot.
    for_next : bool
        True if a weight transfer brings what the next iteration computes with. Its batch is not known yet, so that all
        weights come; within an iteration only those come that some rows are computed with.
    """

    node: Node
    layer: int
    part: int | None
    after: tuple[int, ...] = ()
    weights_of: tuple[tuple[int, int], ...] = ()
    bulk: bool = False
    carry: Carry = Carry.NONE
    page: Page = WHOLE
    for_next: bool = False

    @property
    def name(self) -> str:
        """``A0a``: node code, layer, part; ``W1.0``: page 0 of layer 1's weights."""
        layer = "" if self.layer < 0 else str(self.layer)
        page = f".{self.page.number}" if self.page.pages > 1 else ""
        return f"{self.node.code}{layer}{'' if self.part is None else part_name(self.part)}{page}"

    def place(self, layers: int) -> int:
        """Position in the stack of layers: the layer, -1 before the first, `layers` after the last."""
        after = self.node.kind is NodeKind.HEAD or self.node.lane == "h2d"
        return self.layer if self.layer >= 0 else layers if after else -1


def part_name(part: int) -> str:
    """Name of a part in a printed plan: a, b, ... z, then p26, p27, ..."""
    return chr(ord("a") + part) if part < 26 else f"p{part}"


@dataclass(frozen=True, eq=False)
class Plan:
    """One iteration: the parts of its batch and the tasks that take them through every layer.

    Attributes
    ----------
    schedule : str
    stack : StackGraph
    parts : tuple of Batch
        The batches that the iteration's batch is split into: micro-batches, or the partitions of VSLPipe. The word
        *part* means one of these everywhere in the workbench.
    tasks : tuple of Task
        In issue order: each lane runs its own tasks in this order, and waits while the next one is not ready.
    """

    schedule: str
    stack: StackGraph
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

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.stack.layers

    def __str__(self) -> str:
        parts = [f"  {part_name(index)}  {part.describe()}" for index, part in enumerate(self.parts)]
        nodes = [f"  {node.code}  {node.lane:4}{node.describe()}" for node in self.stack.all_nodes]
        tasks = [f"  {index:3}  {task.node.lane:4}{self._line(task)}" for index, task in enumerate(self.tasks)]
        head = f"{self.schedule}: {self.layers} layers, {len(self.parts)} parts, {len(self.tasks)} tasks"
        return "\n".join(
            [head, "parts", *parts, "nodes", *nodes, "tasks", *tasks, "lanes if every task took one unit", self.chart()]
        )

    def _line(self, task: Task) -> str:
        readers = " ".join(f"{self.stack.graph(layer).nodes[node].code}{layer}" for layer, node in task.weights_of)
        waits = " ".join(self.tasks[index].name for index in task.after)
        what = f"{task.name:5}{f'for {readers} ':12}" if readers else f"{task.name:17}"
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
    before = [0] * len(tasks)  # compute tasks, counted from the first, that have ended when this one starts
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

    A task starts when its lane is free and every task that it waits for has ended; a next task that is not ready
    blocks its lane. A bulk transfer goes in packets of `packet` seconds: a small transfer that becomes ready meanwhile
    starts at the next packet boundary and delays the rest. While a bulk transfer runs that stands in the plan before
    a task, the task makes only ``1 - slowdown`` seconds of progress per second; `slowdowns` has one entry for each
    task, or is empty.

    Notes
    -----
    Packets with priority are VSLPipe's. Small transfers must stand in the plan in the order in which they become ready,
    as they do in the schedules here.
    """
    played = play(Turns.of(tasks, range(len(tasks))), seconds, packet, slowdowns or [0.0] * len(tasks))
    return played.starts, played.ends


class Turns(NamedTuple):
    """The order in which a plan's tasks wait for one another, found once for a plan that is played many times.

    Tasks that take equally long form a group.

    Attributes
    ----------
    tasks : list of (str, tuple of int, bool, int)
        Of each task: its lane, the tasks that it waits for, true if it is bulk, and its group.
    lanes : tuple of str
        Lanes of the tasks that are not bulk.
    groups : list of (str, int)
        Of each group: its lane, and the number of its tasks.
    repeats : list of (Repeat, lanes, int)
        Tasks that repeat; of each repeat the lanes of its tasks that are not bulk, and its reach, see `_reach`.
    """

    tasks: list[tuple[str, tuple[int, ...], bool, int]]
    lanes: tuple[str, ...]
    groups: list[tuple[str, int]]
    repeats: list[tuple[Repeat, tuple[str, ...], int]]

    @classmethod
    def of(cls, tasks: Sequence[Task], groups: Sequence[int]) -> Turns:
        """Make the turns of a plan's tasks, each of which belongs to one of these groups."""
        turns = [(task.node.lane, task.after, task.bulk, group) for task, group in zip(tasks, groups, strict=True)]
        like = []
        for place, (_, after, bulk, group) in enumerate(turns):
            distances = tuple(place - index for index in after)
            like.append((group, bulk, distances))
        repeats = []
        for repeat in find_repeats(like):
            repeats.append((repeat, _lanes(turns[repeat.first : repeat.stop]), _reach(turns, repeat)))
        lane_of = {group: lane for lane, _, _, group in turns}
        counts = Counter(groups)
        return cls(turns, _lanes(turns), [(lane_of[group], counts[group]) for group in sorted(counts)], repeats)


def _lanes(turns: Sequence[tuple[str, tuple[int, ...], bool, int]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lane for lane, _, bulk, _ in turns if not bulk))


def _reach(turns: Sequence[tuple[str, tuple[int, ...], bool, int]], repeat: Repeat) -> int:
    """Tasks from the earliest that later tasks wait for up to the end of a repetition; at least one repetition's."""
    reach = repeat.length
    for place in range(repeat.first + repeat.length, len(turns)):
        for other in turns[place][1]:
            if repeat.first <= other < repeat.stop:
                reach = max(reach, min(place, repeat.stop) - other)
    return reach


class Played(NamedTuple):
    """Starts and ends of tasks, 0 for those that were skipped, and the time for which tasks hold each lane [s]."""

    starts: list[float]
    ends: list[float]
    busy: dict[str, float]


RESTS = (2e-3, 5e-3)
"""Idle times of the gpu lane [s] while weights come: after the first it begins to lose its caches to them, after the
second all is lost.

Where the lane waits for the other compute lane, nothing is added: the operations are timed after such waits.
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
    """Play the turns of a plan as `lay_out` does, with the seconds and slowdowns of its groups.

    A task of the gpu lane that waited for weights takes `cold` seconds longer, and proportionally less after a short
    wait; see `RESTS`.

    With `skip`, once one repetition of a repeat begins as the one before it did, all later ones are left out: they
    would only be shifted, each by the same time.
    """
    lanes = _Lanes(turns, seconds, packet, slowdowns, cold)
    for repeat, of_repeat, reach in turns.repeats if skip else ():
        lanes.pass_repeat(repeat, of_repeat, reach)
    lanes.go_on(len(turns.tasks))
    busy = lanes.longer
    for (lane, count), length in zip(turns.groups, seconds, strict=True):
        busy[lane] += count * length
    return Played(lanes.starts, lanes.ends, busy)


class _Moving(NamedTuple):
    """A bulk transfer under way: its lane, its place before the next task, and its times relative to the last end."""

    lane: str
    back: int
    start: float
    end: float
    since: float


class _State(NamedTuple):
    """The state at the end of a repetition that decides when later tasks run.

    `ends` are the ends of the last tasks, `last` is the end of the very last, and `free` is from when on each lane of
    the repetition is free, relative to `last`. `moving` are the bulk transfers that
    have not ended; if there are none, `over_at` is the end of the last one of each lane, relative to `last`, but at
    least the earliest of `ends`, before which no later transfer begins that waits for a task; `over` is that end as it
    is. `longer` is the time for which each lane has been held beyond the sum of its tasks' own times.
    """

    last: float
    ends: list[float]
    free: list[float]
    moving: list[_Moving]
    over_at: dict[str, float]
    over: dict[str, float]
    longer: dict[str, float]

    def like(self, before: _State, left: int) -> bool:
        """True if `left` more repetitions, at this drift, stay within a thousandth of the length of one."""
        if len(self.ends) != len(before.ends) or len(self.over_at) != len(before.over_at):
            return False
        if [each[:2] for each in self.moving] != [each[:2] for each in before.moving]:
            return False
        shift = self.last - before.last
        apart = [end - other - shift for end, other in zip(self.ends, before.ends, strict=True)]
        apart += [free - other for free, other in zip(self.free, before.free, strict=True)]
        for one, other in zip(self.moving, before.moving, strict=True):
            apart += [one.start - other.start, one.end - other.end, one.since - other.since]
        if self.over_at:
            apart += [end - before.over_at[lane] for lane, end in self.over_at.items()]
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
        self._over_at = dict.fromkeys(LANES, 0.0)  # end of the last bulk transfer that no later task meets
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
        turns = self._turns.tasks
        lanes = self._turns.lanes
        packet = self._packet
        cold = self._cold
        over_at = self._over_at
        for index, (lane, after, is_bulk, group) in enumerate(turns[self._at : stop], self._at):
            length = seconds[group]
            start = free[lane]
            for other in after:
                if ends[other] > start:
                    start = ends[other]
            if is_bulk:
                under_way = bulk.setdefault(lane, [])
                over = free[lanes[0]] if lanes else start  # no later task but a bulk transfer begins before this
                for each in lanes:
                    if free[each] < over:
                        over = free[each]
                while under_way and ends[under_way[0].index] <= over:
                    over_at[lane] = ends[under_way[0].index]
                    del under_way[0]
                if over_at[lane] > start:
                    start = over_at[lane]
                if under_way and ends[under_way[-1].index] > start:
                    start = ends[under_way[-1].index]
                under_way.append(_Bulk(index, start))
                starts[index] = start
                ends[index] = start + length
                continue
            if cold and lane == "gpu" and length:
                ready = max([free[lane], *(ends[other] for other in after if not turns[other][2])])
                slower = cold * min(1.0, max(0.0, (start - ready - RESTS[0]) / (RESTS[1] - RESTS[0])))
                length += slower
                self.longer[lane] += slower
            if lane in bulk and length:
                start = _let_pass(bulk[lane], start, length, starts, ends, packet)
            end = start + length
            slowdown = slowdowns[group]
            if slowdown and length:
                for each in bulk:
                    end = _slowed(bulk[each], start, end, starts, ends, slowdown)
                self.longer[lane] += end - start - length
            starts[index] = start
            ends[index] = free[lane] = end
        self._at = stop

    def pass_repeat(self, repeat: Repeat, lanes: Sequence[str], reach: int) -> None:
        """Run the repetitions of a repeat until one begins as the one before it did, and skip the others."""
        self.go_on(repeat.first)
        before = self._state(lanes, reach)
        while (left := (repeat.stop - self._at) // repeat.length - 1) > 0:
            self.go_on(self._at + repeat.length)
            now = self._state(lanes, reach)
            if now.like(before, left):
                self._skip(repeat.length, left, now, before, lanes)
                return
            before = now

    def _state(self, lanes: Sequence[str], reach: int) -> _State:
        """The state after the tasks that have run; of these, later tasks wait for none but the last `reach`."""
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
        window = ends[max(0, at - reach) : at]
        ended = dict[str, float]()
        over_at = dict[str, float]()
        if self._bulk and not moving:
            earliest = min(window, default=0.0)
            for lane in self._bulk:
                ended[lane] = self._over(lane)
                over_at[lane] = max(ended[lane], earliest) - last
        free = [self._free[lane] - last for lane in lanes]
        return _State(last, window, free, moving, over_at, ended, self.longer.copy())

    def _over(self, lane: str) -> float:
        """End of a lane's last bulk transfer if none is under way."""
        transfers = self._bulk[lane]
        end = self.ends[transfers[-1].index] if transfers else 0.0
        return max(self._over_at[lane], end)

    def _skip(self, tasks: int, times: int, now: _State, before: _State, lanes: Sequence[str]) -> None:
        """Move to the state after `times` more repetitions of `tasks` tasks each."""
        shift = (now.last - before.last) * times
        self._at += tasks * times
        self.ends[self._at - len(now.ends) : self._at] = [end + shift for end in now.ends]
        for lane in lanes:
            self._free[lane] += shift
            self.longer[lane] += (now.longer[lane] - before.longer[lane]) * times
        self._bulk = {lane: [] for lane in self._bulk}
        for lane, end in now.over.items():
            self._over_at[lane] = end + times * (end - before.over.get(lane, end))
        for lane, back, start, end, since in now.moving:
            index = self._at + back
            last = now.last + shift
            self.starts[index] = last + start
            self.ends[index] = last + end
            self._bulk[lane].append(_Bulk(index, last + since))


def _slowed(
    bulk: Sequence[_Bulk], start: float, end: float, starts: list[float], ends: list[float], slowdown: float
) -> float:
    """End of a task from `start` to `end` if bulk transfers slow it down while they run beside it."""
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
    """A bulk transfer under way: its task, and the time since when its packets have followed one another."""

    index: int
    since: float

    def delay(self, late: float, starts: list[float], ends: list[float]) -> None:
        """Shift the transfer by `late` seconds, if that is more than 0."""
        if late > 0:
            starts[self.index] += late
            ends[self.index] += late
            self.since += late


def let_begin(tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float]) -> list[str]:
    """For each task of a plan, the task whose end let it begin (``cpu C0a``), or `ITERATION` if none did."""
    names = lane_names(tasks)
    return [names[place] for place in places_before(tasks, starts, ends)]


def lane_names(tasks: Sequence[Task]) -> list[str]:
    """Lane and name of each task (``cpu C0a``), and `ITERATION` behind them."""
    return [*(f"{task.node.lane} {task.name}" for task in tasks), ITERATION]


def places_before(tasks: Sequence[Task], starts: Sequence[float], ends: Sequence[float]) -> list[int]:
    """For each task of a plan, the place of the task whose end let it begin, or -1 if none did.

    It is the last to end of the tasks that this one waits for and of the one before it on its lane. A task that took
    no time is replaced by the one that let it begin.
    """
    found = list[int]()
    before = dict[tuple[str, bool], int]()
    for index, task in enumerate(tasks):
        lane = task.node.lane
        last = -1
        lines = (False, True) if task.bulk else (False,)  # small transfers pass bulk ones
        held = (before[lane, bulk] for bulk in lines if (lane, bulk) in before)
        for other in (*task.after, *(other for other in held if ends[other] <= starts[index])):
            if last < 0 or ends[other] > ends[last]:
                last = other
        found.append(last if last < 0 or ends[last] > starts[last] else found[last])
        before[lane, task.bulk] = index
    return found


def busy_seconds(tasks: Sequence[Task], seconds: Sequence[float]) -> Mapping[str, float]:
    """Busy time per lane [s]."""
    total = dict.fromkeys(LANES, 0.0)
    for task, length in zip(tasks, seconds, strict=True):
        total[task.node.lane] += length
    return total
