"""WHEN: a plan is an ordered list of tasks on lanes, with what each waits for; and the rule by which lanes run it."""

from __future__ import annotations

import enum
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from workbench.scheduler.batch import Batch
from workbench.segments import Kind, LayerGraph, Node
from workbench.timeline import ITERATION

LANES = ("gpu", "cpu", "d2h", "h2d")


class Page(NamedTuple):
    """One of the `pages` equal shares in which a weight transfer is made, the first being number 0."""

    number: int = 0
    pages: int = 1

    def cut(self, size: float) -> tuple[float, float]:
        """Where the page begins and ends in `size` bytes: at whole multiples of 64 B, the last one at the very end."""
        begin, end = (size * edge // (64 * self.pages) * 64 for edge in (self.number, self.number + 1))
        return begin, size if self.number + 1 == self.pages else end


WHOLE = Page()


class Carry(enum.Enum):
    """Whether a weight transfer keeps within its iteration."""

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
        """Where it stands in a stack: its layer, -1 before the first, `layers` after the last."""
        after = self.node.kind is Kind.HEAD or self.node.lane == "h2d"
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
        return f"<pre>{html.escape(str(self))}</pre>"


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
    drags: Sequence[float] = (),
) -> tuple[list[float], list[float]]:
    """Starts and ends of a plan's tasks when each lane runs its own in issue order [s].

    A task starts when its lane is free and everything it waits for has ended; a first task that is not ready blocks
    its lane. A bulk transfer goes in packets of `packet` seconds: a small transfer that becomes ready meanwhile
    starts at the next packet boundary and delays the rest. While a bulk transfer runs that stands in the plan before
    a task, the task makes only ``1 - drag`` seconds of progress per second; `drags` has one for each task, or none.

    Notes
    -----
    Packets with priority are VSLPipe's. Small transfers must stand in the plan in the order in which they become ready,
    as they do in the schedules here.
    """
    starts, ends, _ = play(Turns.of(tasks), seconds, packet, drags or [0.0] * len(tasks))
    return starts, ends


class Turns(NamedTuple):
    """What of a plan's tasks decides when they may begin, found once for a plan that is played again and again.

    Attributes
    ----------
    tasks : list of (str, tuple of int, bool)
        Of each its lane, what it waits for, and whether it is bulk.
    lanes : tuple of str
        Those of the tasks that are not bulk.
    """

    tasks: list[tuple[str, tuple[int, ...], bool]]
    lanes: tuple[str, ...]

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> Turns:
        """Those of a plan's tasks."""
        lanes = dict.fromkeys(task.node.lane for task in tasks if not task.bulk)
        return cls([(task.node.lane, task.after, task.bulk) for task in tasks], tuple(lanes))


RESTS = (2e-3, 5e-3)
"""Seconds without work from which on the gpu lane cools down, and after which it is all cold: others used its caches.

Between the two halves of a layer it waits for attention: their operations are timed after such a wait.
"""


def play(
    turns: Turns, seconds: Sequence[float], packet: float, drags: Sequence[float], cold: float = 0.0
) -> tuple[list[float], list[float], list[float]]:
    """As `lay_out`, for the turns of a plan: starts, ends, and how long each task holds its lane [s].

    A task with which the gpu lane begins after a rest takes `cold` seconds longer, after a short one less.
    """
    order = turns.tasks
    starts, ends, busy = [0.0] * len(order), [0.0] * len(order), list(seconds)
    free = dict.fromkeys(LANES, 0.0)
    bulk: dict[str, list[_Bulk]] = {}
    for index, ((lane, after, is_bulk), length, drag) in enumerate(zip(order, seconds, drags, strict=True)):
        start = free[lane]
        for other in after:
            if ends[other] > start:
                start = ends[other]
        if is_bulk:
            over = min([free[each] for each in turns.lanes], default=start)  # none but bulk transfers begin before
            before = [transfer for transfer in bulk.get(lane, ()) if ends[transfer.index] > over]
            start = max(start, ends[before[-1].index]) if before else start
            bulk[lane] = [*before, _Bulk(index, start)]
            starts[index], ends[index] = start, start + length
            continue
        if cold and lane == "gpu" and length:
            length += cold * min(1.0, max(0.0, (start - free[lane] - RESTS[0]) / (RESTS[1] - RESTS[0])))
            busy[index] = length
        if lane in bulk and length:
            start = _let_pass(bulk[lane], start, length, starts, ends, packet)
        end = start + length
        if drag and length:
            for transfers in bulk.values():
                end = _dragged(transfers, start, end, starts, ends, drag)
            busy[index] = end - start
        starts[index] = start
        ends[index] = free[lane] = end
    return starts, ends, busy


def _dragged(
    bulk: Sequence[_Bulk], start: float, end: float, starts: list[float], ends: list[float], drag: float
) -> float:
    """End of a task from `start` to `end` that bulk transfers slow down while they run beside it."""
    for transfer in bulk:
        begin, until = starts[transfer.index], ends[transfer.index]
        first, last = start if start > begin else begin, end if end < until else until
        beside = last - first
        if beside > 0:
            slowed, room = beside / (1 - drag), until - first
            end += slowed - beside if slowed <= room else drag * room
    return end


def _let_pass(
    bulk: Sequence[_Bulk], start: float, length: float, starts: list[float], ends: list[float], packet: float
) -> float:
    """Start of a small transfer that is ready at `start`: it delays the bulk transfer under way and those behind it."""
    for transfer in bulk:
        if start < ends[transfer.index]:
            start = transfer.let_pass(start, length, starts, ends, packet)
    for before, behind in pairwise(bulk):
        if ends[before.index] > starts[behind.index]:
            behind.delay(ends[before.index] - starts[behind.index], starts, ends)
    return start


@dataclass(slots=True)
class _Bulk:
    """A bulk transfer under way: which task it is, and since when its packets have followed one another."""

    index: int
    since: float

    def let_pass(self, start: float, length: float, starts: list[float], ends: list[float], packet: float) -> float:
        """Start of a small transfer that is ready at `start`, for which this one waits between packets."""
        if start <= starts[self.index]:
            self.delay(start + length - starts[self.index], starts, ends)
            return start
        packets, end = -(-(start - self.since) // packet), ends[self.index]
        start = min(self.since + packets * packet, end) if packets > 0 else max(start, self.since)
        if start < end:
            ends[self.index] += length
            self.since = start + length
        return start

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
    found, before = list[str](), dict[tuple[str, bool], int]()
    for index, task in enumerate(tasks):
        lane, last = task.node.lane, -1
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
