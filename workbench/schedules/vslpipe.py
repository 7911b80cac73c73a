"""MoE-Lens' VSLPipe: two partitions alternate between GPU and CPU while the next stage's weights stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workbench.errors import ScheduleError
from workbench.plan import Task
from workbench.schedules.base import Schedule, Step, TaskList
from workbench.segments import EMBED, HEAD, WEIGHTS, Kind, LayerGraph

_A, _Q, _C, _H, _B = range(5)
_SHAPE = ((Kind.SEGMENT, "gpu"), (Kind.MOVE, "d2h"), (Kind.SEGMENT, "cpu"), (Kind.MOVE, "h2d"), (Kind.SEGMENT, "gpu"))


@dataclass(frozen=True)
class VSLPipe(Schedule):
    """Prefill and decode of two balanced partitions overlap on GPU and CPU, phase by phase.

    Needs a pipeline of the shape ``gpu(...) >> offload >> cpu(...) >> load >> gpu(...)``. Stage i is the CPU task
    of layer i, the last GPU segment of layer i and the first of layer i+1, in two phases that end together on both
    devices. The weights of the next stage stream in packets of about `packet_seconds`, which is 100 MB on a
    19.5 GB/s link; transfers of activations pass between packets. The last stage brings the weights with which the
    next iteration begins. Two layers, between the first and the last iteration::

        gpu Ea  A0a .   Eb  A0b .   B0a A1a .   B0b A1b .   B1a Za  B1b Zb
        cpu .   .   .   C0a .   .   C0b .   .   C1a .   .   C1b .   .   .
        d2h .   .   Q0a .   .   Q0b .   .   Q1a .   .   Q1b .   .   .   .
        h2d .   .   .   .   H0a .   W1  H0b .   .   H1a .   W0  H1b .   .

    Notes
    -----
    MoE-Lens, section 6.4 and Figure 8; SPEC 3. Cutting a layer's transfer into "last segment of i, first of i+1" is
    ours: the paper asks for whole layers, this asks for what the stage computes.
    """

    packet_seconds: float = 5e-3

    def __post_init__(self) -> None:
        if not self.packet_seconds > 0:
            raise ScheduleError(f"VSLPipe's packet_seconds must be positive, not {self.packet_seconds}.")

    @property
    def parts(self) -> int:
        """The partitions a and b."""
        return 2

    def tasks(self, graph: LayerGraph, layers: int, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        shape = tuple((node.kind, node.lane) for node in graph.nodes)
        if shape != _SHAPE or graph.enter or graph.leave:
            raise ScheduleError(
                f"VSLPipe needs a pipeline of the shape gpu(...) >> offload >> cpu(...) >> load >> gpu(...), not "
                f"{graph.pipeline}. Wire it so, or use Sequential()."
            )
        return _Phases(graph, layers).run(step)


class _Phases:
    """Issues the phases one after the other; each waits for the sinks of the one before."""

    def __init__(self, graph: LayerGraph, layers: int) -> None:
        self.order, self.graph, self.layers = TaskList(), graph, layers
        self.barrier: tuple[int, ...] = ()

    def run(self, step: Step) -> tuple[Task, ...]:
        a, b, last = 0, 1, self.layers - 1
        if Step.FIRST in step:
            self.barrier = self.weights([(0, _A)])
        ahead = [] if Step.LAST in step and not last else [(1, _A)]
        arriving = self.weights([(0, _B), *ahead]) if Step.FIRST in step else ()
        self.barrier = self.first(a)
        self.barrier = (*self.first(b), *self.attend(0, a), *arriving)
        for layer in range(last):
            coming = (
                [(layer + 1, _B)] if Step.LAST in step and layer + 1 == last else [(layer + 1, _B), (layer + 2, _A)]
            )
            arriving = self.weights(coming)
            self.barrier = (*self.advance(layer, a), *self.attend(layer, b))
            self.barrier = (*self.advance(layer, b), *self.attend(layer + 1, a), *arriving)
        next_step = () if Step.LAST in step else self.weights([(0, _B), (1, _A)])
        self.barrier = (*self.finish(last, a), *self.attend(last, b))
        self.barrier = (*self.finish(last, b), *next_step)
        return tuple(self.order.tasks)

    def weights(self, pieces: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        """Request the weights of these nodes, those of layers past the last being the next iteration's."""
        wanted = tuple((layer % self.layers, node) for layer, node in pieces if self.graph.nodes[node].streamed)
        if not wanted:
            return ()
        return (self.order.add(WEIGHTS, wanted[0][0], None, self.barrier, pieces=wanted, bulk=True),)

    def first(self, part: int) -> tuple[int, ...]:
        """Embedding and the first segment of layer 0."""
        embedded = self.order.add(EMBED, -1, part, self.barrier)
        return self.send(0, part, (embedded,))

    def advance(self, layer: int, part: int) -> tuple[int, ...]:
        """The last segment of a layer and the first of the next."""
        done = self.order.add(self.graph.nodes[_B], layer, part, self.barrier)
        return self.send(layer + 1, part, (done,))

    def send(self, layer: int, part: int, after: tuple[int, ...]) -> tuple[int, ...]:
        """The first segment of a layer, and its queries, keys and values to the CPU."""
        computed = self.order.add(self.graph.nodes[_A], layer, part, after)
        return (self.order.add(self.graph.nodes[_Q], layer, part, (computed,)),)

    def attend(self, layer: int, part: int) -> tuple[int, ...]:
        """Decode attention on the CPU, and its output to the GPU."""
        attended = self.order.add(self.graph.nodes[_C], layer, part, self.barrier)
        return (self.order.add(self.graph.nodes[_H], layer, part, (attended,)),)

    def finish(self, layer: int, part: int) -> tuple[int, ...]:
        """The last segment of the last layer, and the head."""
        done = self.order.add(self.graph.nodes[_B], layer, part, self.barrier)
        return (self.order.add(HEAD, -1, part, (done,)),)
