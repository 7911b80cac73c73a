"""The interface of schedules, the split of batches into micro-batches, and the memo of lowered tasks."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

from workbench.core.display import short_name
from workbench.core.errors import ScheduleError
from workbench.core.units import is_whole
from workbench.pipeline import Pipeline, Stack
from workbench.pipeline.layer_graph import Node
from workbench.pipeline.stack_graph import StackGraph, stack_graph
from workbench.scheduler.base import Scheduler
from workbench.scheduler.batch import NONE, Batch, Ids
from workbench.schedules.plan import WHOLE, Carry, Page, Plan, Task, lay_out

Seconds = Callable[[Sequence[Task]], Sequence[float]]
"""Gives the time of each of some tasks for a typical batch [s]."""
Whole = Callable[[Sequence[Task]], float]
"""Gives the time that all tasks of an iteration take together for a typical batch [s]."""


class Step(enum.Flag):
    """Position of an iteration in its run. Before the first no weights are loaded; after the last none are needed."""

    MIDDLE = 0
    FIRST = enum.auto()
    LAST = enum.auto()


class Schedule(ABC):
    """Order and overlap of one iteration's tasks. Equal schedules give equal tasks: make it a frozen dataclass.

    Attributes
    ----------
    packet_seconds : float
        Time of a packet of weights, between which transfers of activations pass [s].
    weight_slots : int
        Buffers for streamed weights on the GPU; each holds one transfer.
    """

    example: ClassVar[Pipeline | None] = None
    """A pipeline that the schedule takes with its default settings; tests and `bench sim` use the schedule with it."""

    @property
    @abstractmethod
    def parts(self) -> int:
        """Number of parts that a batch is split into: micro-batches or partitions, see `Plan.parts`."""

    @property
    def part_slots(self) -> int:
        """Buffers for streamed KV and for chosen experts on the GPU; each holds those of one part in one layer."""
        return self.parts

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the system that the schedule is of; None if it is of none."""
        return None

    @property
    def others(self) -> tuple[Schedule, ...]:
        """Schedules with as many parts and no more slots; see `Lowering.followed`."""
        return ()

    @property
    def by_times(self) -> bool:
        """True if the times of tasks decide in which order they are issued; see `order` and `others`."""
        return bool(self.others) or type(self).order is not Schedule.order

    packet_seconds: float = 5e-3
    weight_slots: int = 2

    @abstractmethod
    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        """The tasks of one iteration in issue order, the same for every batch.

        Raises
        ------
        ScheduleError
            If the layers have another shape than this schedule needs.
        """

    def order(self, tasks: Sequence[Task], seconds: Seconds) -> Sequence[int]:
        """Places of the tasks in the order in which they are issued; `seconds` are their times for a typical batch."""
        return range(len(tasks))

    def split(self, batch: Batch) -> tuple[Batch, ...]:
        """Split a batch into parts, balanced in decode tokens and in prefill tokens separately."""
        return balanced(batch, self.parts)

    def lower(self, pipeline: Pipeline | Stack, batch: Batch, step: Step = Step.MIDDLE) -> Plan:
        """The plan of one iteration of a model whose layers are all of one kind."""
        return Lowering(self, stack_graph(pipeline, batch.layers)).plan(batch, step)

    @property
    def name(self) -> str:
        """Class name, and the settings that differ from their defaults."""
        return short_name(self)


def two_or_more(schedule: Schedule, unit: str) -> int:
    """The `weight_slots` of a schedule, checked: a transfer brings the weights of one `unit`.

    Raises
    ------
    ScheduleError
        If they are no whole number of at least 2.
    """
    slots = schedule.weight_slots
    if not is_whole(slots) or slots < 2:
        raise ScheduleError(
            f"{type(schedule).__name__}'s weight_slots must be at least 2, not {slots!r}: one {unit}'s weights are "
            "used while the next one's arrive."
        )
    return int(slots)


_KEPT = 128
"""Lists of tasks that are kept for other scenarios with the same layers: more than all schedules have of one wiring."""
_NOISE = 1e-9
"""Relative difference between sums of the same times, added up in another order."""


class Lowering:
    """A schedule applied to a stack of layers: lowers once for every `Step` and reuses the tasks.

    Parameters
    ----------
    seconds : callable, optional
        Time of each of some tasks for a typical batch, by which schedules may order them; by default all take equally
        long.
    whole : callable, optional
        Time of all tasks of an iteration together, by which a schedule and its others are compared; by default from
        the time of each task.
    """

    def __init__(
        self, schedule: Schedule, stack: StackGraph, seconds: Seconds | None = None, whole: Whole | None = None
    ) -> None:
        self.schedule = schedule
        self.stack = stack
        self._seconds = seconds or (lambda tasks: [1.0] * len(tasks))
        self._whole = whole or self._laid_out
        self._name = schedule.name
        self._memo = dict[tuple[str, int], tuple[Task, ...]]()

    def plan(self, batch: Batch, step: Step) -> Plan:
        """The plan of one iteration."""
        return Plan(self._name, self.stack, self.schedule.split(batch), self.tasks(step))

    def check(self) -> None:
        """Raise ScheduleError if the layers have another shape than the schedule needs; it is not ordered for that."""
        _unordered(self.schedule, self.stack, Step.MIDDLE)

    def tasks(self, step: Step) -> tuple[Task, ...]:
        """The tasks of one iteration."""
        return self._of(self.followed, step)

    @cached_property
    def brought(self) -> frozenset[tuple[tuple[int, int], ...]]:
        """The weights of every weight transfer of any iteration, see `Task.weights_of`."""
        own, *others = (_brought(each, self.stack) for each in (self.schedule, *self.schedule.others))
        return own if all(other == own for other in others) else _brought(self.followed, self.stack)

    @cached_property
    def followed(self) -> Schedule:
        """The schedule, or the fastest of its others if that is faster; the same in every iteration.

        An iteration begins with the weights that the one before has left in the slots.
        """
        if not self.schedule.others:
            return self.schedule
        seconds = {each: self._whole(self._of(each, Step.MIDDLE)) for each in (self.schedule, *self.schedule.others)}
        fastest = min(self.schedule.others, key=lambda each: seconds[each])
        return fastest if seconds[fastest] < seconds[self.schedule] * (1 - _NOISE) else self.schedule

    def _of(self, schedule: Schedule, step: Step) -> tuple[Task, ...]:
        """The tasks of one iteration under a schedule."""
        key = (schedule.name, step.value)
        if key not in self._memo:
            order = schedule.order(_unordered(schedule, self.stack, step), self._seconds)
            self._memo[key] = _issued(schedule, self.stack, step, tuple(order))
        return self._memo[key]

    def _laid_out(self, tasks: Sequence[Task]) -> float:
        _, ends = lay_out(tasks, self._seconds(tasks), self.schedule.packet_seconds)
        return max(ends)


@lru_cache(maxsize=_KEPT)
def _unordered(schedule: Schedule, stack: StackGraph, step: Step) -> tuple[Task, ...]:
    """The tasks of one iteration before `Schedule.order`, which batches of any size share."""
    return schedule.tasks(stack, step)


@lru_cache(maxsize=_KEPT)
def _brought(schedule: Schedule, stack: StackGraph) -> frozenset[tuple[tuple[int, int], ...]]:
    """The weights of every weight transfer of any iteration, which do not depend on the order."""
    steps = (Step.FIRST, Step.MIDDLE, Step.LAST)
    return frozenset(task.weights_of for step in steps for task in _unordered(schedule, stack, step) if task.weights_of)


@lru_cache(maxsize=_KEPT)
def _issued(schedule: Schedule, stack: StackGraph, step: Step, order: tuple[int, ...]) -> tuple[Task, ...]:
    """The tasks of one iteration in an order: the same ones for all typical batches that lead to it."""
    tasks = _unordered(schedule, stack, step)
    if order != tuple(range(len(tasks))):
        tasks = _reordered(tasks, order)
    return tuple(_marked(tasks, stack))


def _reordered(tasks: Sequence[Task], order: Sequence[int]) -> tuple[Task, ...]:
    """The tasks in an order, each with the new places of those that it waits for."""
    place = {index: after for after, index in enumerate(order)}
    found = list[Task]()
    for index in order:
        task = tasks[index]
        found.append(task._replace(after=tuple(sorted([place[other] for other in task.after]))))
    return tuple(found)


def _marked(tasks: Sequence[Task], stack: StackGraph) -> Iterator[Task]:
    """The tasks; of weight transfers those are marked for the next iteration that no reader in this one awaits."""
    readers: dict[tuple[int, str], list[int]] = {}
    for place, task in enumerate(tasks):
        readers.setdefault((task.layer, task.node.code), []).append(place)
    for place, task in enumerate(tasks):
        codes = [(layer, stack.graph(layer).nodes[node].code) for layer, node in task.weights_of]
        awaited = [_awaits(tasks, readers.get(code, ()), place) for code in codes]
        yield task if all(awaited) else task._replace(for_next=True)


def _awaits(tasks: Sequence[Task], readers: Sequence[int], transfer: int) -> bool:
    """True if the first reader behind a transfer waits for it, directly or through others."""
    first = next((reader for reader in readers if reader > transfer), None)
    waiting = [] if first is None else [first]
    seen = set[int]()
    while waiting:
        after = tasks[waiting.pop()].after
        if transfer in after:
            return True
        later = [other for other in after if other > transfer and other not in seen]
        seen.update(later)
        waiting += later
    return False


class TaskList:
    """Collects the tasks of a plan."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(
        self,
        node: Node,
        layer: int,
        part: int | None,
        after: Iterable[int],
        *,
        weights_of: tuple[tuple[int, int], ...] = (),
        bulk: bool = False,
        carry: Carry = Carry.NONE,
        page: Page = WHOLE,
    ) -> int:
        """Append a task and return its place in the plan."""
        awaited = tuple(after)
        if len(awaited) > 1:
            awaited = tuple(sorted(set(awaited)))
        self.tasks.append(Task(node, layer, part, awaited, weights_of, bulk, carry, page))
        return len(self.tasks) - 1

    def enter(self, stack: StackGraph, layer: int, part: int, after: Sequence[int]) -> Sequence[int]:
        """Add the transfer of the residual stream to where a layer, or the head, needs it.

        Returns what the layer's first tasks wait for: the transfer, or `after` if there is none.
        """
        move = stack.before(layer)
        if move is None:
            return after
        inside = 0 < layer < stack.layers
        return (self.add(move, layer if inside else -1, part, after),)


def balanced(batch: Batch, parts: int) -> tuple[Batch, ...]:
    """Split a batch into parts of about equal load.

    Decodes go to the parts in turn, because neighbours have contexts of similar length. Prefills go, the longest first,
    to the part with the fewest prefill tokens. A scheduler's hint is followed instead if it has as many parts.
    """
    if parts == 1:
        return (batch,)
    if batch.hint is not None and batch.hint.parts == parts:
        of_prefills, of_decodes = np.split(batch.hint.part, [len(batch.prefills)])
        return tuple(
            batch.take(np.flatnonzero(of_prefills == part), np.flatnonzero(of_decodes == part)) for part in range(parts)
        )
    taken = _least_loaded(batch.prefill_len, parts)
    return tuple(batch.take(taken[part], slice(part, None, parts)) for part in range(parts))


def _least_loaded(lengths: Ids, parts: int) -> list[Ids]:
    """Prefills of every part: the longest first, each to the part that has the fewest tokens so far."""
    if not len(lengths):
        return [NONE] * parts
    load = [0] * parts
    chosen: list[list[int]] = [[] for _ in range(parts)]
    order = np.argsort(-lengths, kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        part = load.index(min(load))
        load[part] += length
        chosen[part].append(index)
    return [np.array(indices, dtype=np.int64) for indices in chosen]
