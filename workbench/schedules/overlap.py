"""A schedule for any wiring: micro-batches in an order that list scheduling finds for the scenario's typical batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from workbench.pipeline import Pipeline, cpu, gpu, load, offload
from workbench.pipeline.layer_graph import Node, NodeKind
from workbench.pipeline.stack_graph import StackGraph
from workbench.schedules.base import Schedule, Seconds, Step, two_or_more
from workbench.schedules.micro_batches import Dataflow, MicroBatched, WeightPlace, WeightsOf
from workbench.schedules.plan import COMPUTE, Task
from workbench.schedules.sequential import Sequential
from workbench.stages import combine, decode_attention, experts, out_proj, prefill_attention, qkv, route

_FETCHED = (NodeKind.KV_IN, NodeKind.EXPERTS_IN)


@dataclass(frozen=True)
class Overlap(MicroBatched):
    """One order for all batches, found by list scheduling with the times of the scenario's typical batch.

    Takes any pipeline and any stack. Of each lane's tasks the next one is always that which can begin first; of equal
    ones, that which soonest gives work to another lane. The typical batch has as many requests as the KV cache holds,
    of all ages. In a batch unlike it a lane waits for its next task, also where a later one is ready. Weights stream in
    packets, between which transfers of activations pass, into as many slots as asked for: a transfer brings those of a
    layer's experts and of the next layer's projections. Fetched KV has two slots, and so have chosen experts. Where
    ``Sequential(prefetch=True)`` with as many micro-batches takes less time for the typical batch and for its decodes
    alone together, its order is followed instead. Two layers of the example, if every task takes one unit::

        gpu Ea  A0a Eb  A0b .   B0a .   B0b .   F0a A1a F0b A1b .   B1a .   B1b .   F1a Za  F1b Zb
        cpu .   .   .   C0a .   C0b .   D0a .   D0b .   .   C1a .   C1b .   D1a .   D1b .   .   .
        d2h .   .   Q0a .   Q0b .   T0a .   T0b .   .   Q1a .   Q1b .   T1a .   T1b .   .   .   .
        h2d .   .   .   .   H0a .   H0b .   X0a .   X0b .   .   H1a .   H1b .   X1a .   X1b .   .

    Notes
    -----
    List scheduling: Graham, Bounds on multiprocessing timing anomalies, 1969.
    """

    example: ClassVar[Pipeline] = (
        gpu(qkv, prefill_attention)
        >> offload
        >> cpu(decode_attention)
        >> load
        >> gpu(out_proj, route)
        >> offload
        >> cpu(experts)
        >> load
        >> gpu(combine)
    )

    micro_batches: int = 2
    weight_slots: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "weight_slots", two_or_more(self, "layer"))

    @property
    def part_slots(self) -> int:
        """Two: one for the KV that is read and one for the KV that comes."""
        return 2

    @property
    def others(self) -> tuple[Schedule, ...]:
        """Prefetch alone: list scheduling does not see that weights on their way slow down what reads host memory."""
        return (Sequential(self.micro_batches, prefetch=True),)

    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`: layer after layer, and in each one micro-batch after the other."""
        plan = Dataflow(stack, step, slots=self.weight_slots, groups=_weights_by_experts(stack), bulk=True)
        fetched = {kind: _Fetched(self.part_slots) for kind in _FETCHED}
        late: dict[int, int] = {}  # the task that computes what the layer before deferred, by part
        for layer in range(stack.layers):
            for part in range(self.parts):
                if not layer:
                    plan.begin(part)
                for place, node in enumerate(stack.at(layer)):
                    if node is None:
                        continue
                    also = list[int]()
                    if node.kind in _FETCHED:
                        also = fetched[node.kind].awaited
                    elif part in late and _adds_late(node):
                        also = [late.pop(part)]
                    task = plan.run(layer, place, part, *also)
                    if node.kind in _FETCHED:
                        fetched[node.kind].transfers.append(task)
                    for kind in _read_fetched(stack, layer, node):
                        fetched[kind].readers.append(task)
                    if node.kind is NodeKind.DEFERRED:
                        late[part] = task
            plan.load_at(WeightPlace.FIRST, layer, 0, self.parts)
        for part in range(self.parts):
            plan.end(part)
        return plan.tasks

    def order(self, tasks: Sequence[Task], seconds: Seconds) -> Sequence[int]:
        """See `Schedule.order`: by list scheduling."""
        return _by_earliest_start(tasks, seconds(tasks))


class _Fetched:
    """Transfers of what is fetched for single parts, and the tasks that read it; they take turns in the slots."""

    def __init__(self, slots: int) -> None:
        self.transfers: list[int] = []
        self.readers: list[int] = []
        self._slots = slots

    @property
    def awaited(self) -> list[int]:
        """Tasks that the next transfer waits for: the one before it, and the reader of what is in its slot."""
        reader = self.readers[-self._slots :][:1] if len(self.readers) >= self._slots else []
        return [*self.transfers[-1:], *reader]


def _weights_by_experts(stack: StackGraph) -> list[WeightsOf]:
    """The streamed nodes from the experts of one layer to before those of the next; the first also has what is before.

    Without streamed experts, the last streamed node of a layer stands for them. The slot of such a group is free
    earlier than that of a layer: not while attention is awaited between the projections and the experts.
    """
    found = list[WeightsOf]()
    for layer in range(stack.layers):
        streamed = stack.streamed(layer)
        if not streamed:
            continue
        nodes = stack.graph(layer).nodes
        routed = [node for node in streamed if _is_routed(nodes[node])]
        heaviest = routed[0] if routed else streamed[-1]
        early = tuple((layer, node) for node in streamed if node < heaviest)
        late = tuple((layer, node) for node in streamed if node >= heaviest)
        if found:
            found[-1] += early
        found.append(late if found else early + late)
    return found


def _is_routed(node: Node) -> bool:
    """True for a segment with the weights of routed experts."""
    return any(stage.op.routed for stage in node.stages)


def _adds_late(node: Node) -> bool:
    """True for a segment with the experts, which adds what the layer before deferred."""
    return node.kind is NodeKind.SEGMENT and any(stage.op is experts for stage in node.stages)


def _read_fetched(stack: StackGraph, layer: int, node: Node) -> set[NodeKind]:
    """The kinds of transfers for its part alone that a segment reads from: KV, or chosen experts."""
    if node.kind is not NodeKind.SEGMENT:
        return set()
    return {stack.graph(layer).nodes[other].kind for other in node.after}.intersection(_FETCHED)


def _by_earliest_start(tasks: Sequence[Task], seconds: Sequence[float]) -> list[int]:
    """Places of the tasks in the order in which they begin, if always that begins next which can first.

    Bulk transfers have a lane of their own here: others pass between their packets. They keep their order, in which
    they take turns in the slots.
    """
    kinds = [(task.node.lane, task.bulk) for task in tasks]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    lanes = [numbers[kind] for kind in kinds]
    followers = _followers(tasks)
    urgency = _until_other_lane(tasks, followers, seconds)
    bulk = [index for index, task in enumerate(tasks) if task.bulk]
    next_bulk = {before: (after,) for before, after in pairwise(bulk)}
    waiting = [len(task.after) for task in tasks]
    for index in bulk[1:]:
        waiting[index] += 1
    since = [0.0] * len(tasks)  # end of what each waits for
    free = [0.0] * len(numbers)
    ready = [index for index, count in enumerate(waiting) if not count]
    found = list[int]()
    while ready:
        index = ready[0]
        start = max(since[index], free[lanes[index]])
        for other in ready[1:]:
            at = max(since[other], free[lanes[other]])
            if (at, urgency[other], other) < (start, urgency[index], index):
                index = other
                start = at
        ready.remove(index)
        end = start + seconds[index]
        free[lanes[index]] = end
        found.append(index)
        for other in followers[index]:
            since[other] = max(since[other], end)
        for other in (*followers[index], *next_bulk.get(index, ())):
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    return found


def _followers(tasks: Sequence[Task]) -> list[list[int]]:
    """Of each task, those that wait for it."""
    found: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for other in task.after:
            found[other].append(index)
    return found


def _until_other_lane(
    tasks: Sequence[Task], followers: Sequence[Sequence[int]], seconds: Sequence[float]
) -> list[float]:
    """Time from the beginning of each task until it has given work to another compute lane; infinite if it never does.

    Transfers on the way count as what they lead to.
    """
    never = float("inf")
    lanes = [task.node.lane for task in tasks]
    found = [never] * len(tasks)
    for index in range(len(tasks) - 1, -1, -1):
        lane = lanes[index]
        least = never
        for other in followers[index]:
            rest = 0.0 if lane in COMPUTE and lanes[other] != lane else found[other]
            if rest < least:
                least = rest
        found[index] = seconds[index] + least
    return found
