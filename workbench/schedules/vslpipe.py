"""MoE-Lens' VSLPipe: two partitions alternate between GPU and CPU while the weights of the next stage stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from workbench.core.errors import ScheduleError
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.pipeline.layer_graph import EMBED, HEAD, WEIGHTS
from workbench.pipeline.stack_graph import StackGraph
from workbench.scheduler.resource_aware import ResourceAware
from workbench.schedules.base import Schedule, Step, TaskList, two_or_more
from workbench.schedules.micro_batches import check_attention_on_cpu
from workbench.schedules.plan import Carry, Task
from workbench.stages import decode_attention, moe, out_proj, prefill_attention, qkv, weights

_A, _Q, _C, _H, _B = range(5)


@dataclass(frozen=True)
class VSLPipe(Schedule):
    """Prefill and decode of two balanced partitions overlap on GPU and CPU, phase by phase.

    Needs a pipeline of the shape ``gpu(...) >> offload >> cpu(...) >> load >> gpu(...)``. Stage i is the CPU task
    of layer i, the last GPU segment of layer i and the first of layer i+1, in two phases that end together on both
    devices. The weights of the next stage stream in packets of about `packet_seconds`, which is 100 MB on a
    19.5 GB/s link; transfers of activations pass between packets. The last stage brings the weights of the next
    iteration's prologue and first stage. The weights of its second stage stream as soon as a slot is free, and their
    transfer runs on over the iteration's end. With two slots the link then rests until the first stage is over; a third
    slot (``weight_slots=3``) lets it go on. Two layers, between the first and the last iteration::

        gpu Ea  A0a .   Eb  A0b .   B0a A1a .   B0b A1b .   B1a Za  B1b Zb
        cpu .   .   .   C0a .   .   C0b .   .   C1a .   .   C1b .   .   .
        d2h .   .   Q0a .   .   Q0b .   .   Q1a .   .   Q1b .   .   .   .
        h2d W1  .   .   .   H0a .   .   H0b .   .   H1a .   W0  H1b .   W1

    Notes
    -----
    MoE-Lens, section 6.4 and Figure 8. Two things are ours. A transfer brings the weights that a stage computes with,
    "last segment of i, first of i+1", where the paper transfers whole layers. And a transfer may run on into the next
    iteration: without that the link was idle for 6 % of a pass where the weights took as long as the computation
    (2 Zen 4 cores).
    """

    example: ClassVar[Pipeline] = fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(
        decode_attention
    ) >> load >> gpu(out_proj, moe)

    packet_seconds: float = 5e-3
    weight_slots: int = 2

    def __post_init__(self) -> None:
        if not self.packet_seconds > 0:
            raise ScheduleError(f"VSLPipe's packet_seconds must be positive, not {self.packet_seconds}.")
        object.__setattr__(self, "weight_slots", two_or_more(self, "stage"))

    @property
    def parts(self) -> int:
        """The partitions a and b."""
        return 2

    @property
    def scheduler(self) -> ResourceAware:
        """See `Schedule.scheduler`: MoE-Lens' own."""
        return ResourceAware()

    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        check_attention_on_cpu("VSLPipe", stack)
        return _Phases(stack, self.weight_slots, step).run()


class _Phases:
    """Issues the phases one after the other; each waits for the sinks of the one before.

    The weights of the stages are requested in the stages' order, one whenever a slot becomes free.
    """

    def __init__(self, stack: StackGraph, slots: int, step: Step) -> None:
        self.order = TaskList()
        self.stack = stack
        self.layers = stack.layers
        self.step = step
        self.barrier: tuple[int, ...] = ()
        self.arriving: dict[int, tuple[int, ...]] = {}
        self.free = slots
        self.prologue = self.streamed([(0, _A)])
        self.wanted = deque(each for each in self.transfers() if each[1])

    def transfers(self) -> Iterator[tuple[int, list[tuple[int, int]], Carry]]:
        """Stage, nodes and carry of every weight transfer to request; the next iteration's stages are numbered on."""
        for stage in range(0 if Step.FIRST in self.step else 2, self.layers):
            yield stage, self.computed_in(stage), Carry.NONE
        if Step.LAST not in self.step:
            yield self.layers, self.prologue + self.computed_in(0), Carry.NONE
            if self.layers > 1:
                yield self.layers + 1, self.computed_in(1), Carry.OUT

    def computed_in(self, stage: int) -> list[tuple[int, int]]:
        """The streamed (layer, node) pairs of a stage; layer 0's first segment is the prologue, in no stage."""
        return self.streamed([(stage, _B)] if stage + 1 == self.layers else [(stage, _B), (stage + 1, _A)])

    def streamed(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The given (layer, node) pairs, without those whose weights are resident."""
        return [(layer, node) for layer, node in pairs if node in self.stack.streamed(layer)]

    def run(self) -> tuple[Task, ...]:
        a = 0
        b = 1
        last = self.layers - 1
        self.open()
        self.barrier = self.first(a)
        self.barrier = (*self.first(b), *self.attend(0, a), *self.arriving.get(0, ()))
        for layer in range(last):
            self.begin(layer)
            self.barrier = (*self.advance(layer, a), *self.attend(layer, b))
            self.barrier = (*self.advance(layer, b), *self.attend(layer + 1, a), *self.arriving.get(layer + 1, ()))
        self.begin(last)
        self.barrier = (self.head(a, self.finish(last, a)), *self.attend(last, b))
        self.barrier = (self.finish(last, b),)
        self.head(b, *self.barrier)
        self.begin(self.layers)
        return tuple(self.order.tasks)

    def open(self) -> None:
        """Request weights for the slots that are free before the prologue; the others hold the first stages'."""
        if Step.FIRST in self.step:
            self.barrier = self.weights(self.prologue)
            self.free -= bool(self.prologue)
        else:
            self.free -= bool(self.prologue or self.computed_in(0))
            if self.layers > 1:
                self.arriving[1] = self.weights(self.computed_in(1), Carry.IN)
                self.free -= bool(self.arriving[1])
        self.request()

    def begin(self, stage: int) -> None:
        """Request weights for the slot that is free once the stage before this one has been computed.

        Before stage 0 none is free after the first iteration: the prologue's weights share the slot of stage 0.
        """
        if stage > 1 or Step.FIRST in self.step:
            self.free += bool(self.computed_in(stage - 1) if stage else self.prologue)
        elif stage == 1:
            self.free += bool(self.prologue or self.computed_in(0))
        self.request()

    def request(self) -> None:
        """Request the weights of the next stages, as many as slots are free."""
        while self.free and self.wanted:
            stage, weights_of, carry = self.wanted.popleft()
            self.arriving[stage] = self.weights(weights_of, carry)
            self.free -= 1

    def weights(self, weights_of: Iterable[tuple[int, int]], carry: Carry = Carry.NONE) -> tuple[int, ...]:
        """Add the transfer of the weights of these (layer, node) pairs; none if there are no pairs."""
        wanted = tuple(weights_of)
        if not wanted:
            return ()
        brought = () if carry is Carry.IN else wanted
        return (self.order.add(WEIGHTS, wanted[0][0], None, self.barrier, weights_of=brought, bulk=True, carry=carry),)

    def first(self, part: int) -> tuple[int, ...]:
        """Add the embedding and the first segment of layer 0."""
        embedded = self.order.add(EMBED, -1, part, self.barrier)
        return self.send(0, part, (embedded,))

    def advance(self, layer: int, part: int) -> tuple[int, ...]:
        """Add the last segment of a layer and the first of the next."""
        done = self.add(_B, layer, part, self.barrier)
        return self.send(layer + 1, part, (done,))

    def send(self, layer: int, part: int, after: tuple[int, ...]) -> tuple[int, ...]:
        """Add the first segment of a layer, and the transfer of its queries, keys and values to the CPU."""
        computed = self.add(_A, layer, part, after)
        return (self.add(_Q, layer, part, (computed,)),)

    def attend(self, layer: int, part: int) -> tuple[int, ...]:
        """Add decode attention on the CPU, and the transfer of its output to the GPU."""
        attended = self.add(_C, layer, part, self.barrier)
        return (self.add(_H, layer, part, (attended,)),)

    def finish(self, layer: int, part: int) -> int:
        """Add the last segment of the last layer."""
        return self.add(_B, layer, part, self.barrier)

    def add(self, place: int, layer: int, part: int, after: Iterable[int]) -> int:
        """Add one of a layer's five nodes."""
        return self.order.add(self.stack.node(layer, place), layer, part, after)

    def head(self, part: int, done: int) -> int:
        """Add the head."""
        return self.order.add(HEAD, -1, part, (done,))
