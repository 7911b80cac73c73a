"""FastDecode's overlap as MoE-Lightning draws it (S2): CPU attention ahead, and a layer's weights in one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.pipeline.stack_graph import StackGraph
from workbench.scheduler.static import StaticBatching
from workbench.schedules.base import Step
from workbench.schedules.micro_batches import MicroBatched, WeightPlace, attention_on_cpu, check_attention_on_cpu
from workbench.schedules.plan import Task
from workbench.stages import decode_attention, moe, out_proj, prefill_attention, qkv, weights


@dataclass(frozen=True)
class FastDecode(MicroBatched):
    """CPU attention two micro-batches ahead of the experts; the next layer's weights come in one transfer, the last.

    Needs a pipeline of the shape ``gpu(...) >> offload >> cpu(...) >> load >> gpu(...)`` and two micro-batches or
    more. It differs from CGOPipe in one thing: the next layer's weights are one transfer behind the attention output
    of the layer's last micro-batch. Two layers and ``micro_batches=2``, between the first and the last iteration::

        gpu Ea  A0a Eb  A0b .   B0a A1a B0b A1b .   B1a Za  B1b Zb
        cpu .   .   .   C0a .   C0b .   .   C1a .   C1b .   .   .
        d2h .   .   Q0a .   Q0b .   .   Q1a .   Q1b .   .   .   .
        h2d .   .   .   .   H0a .   H0b W1  .   H1a .   H1b W0  .

    Notes
    -----
    MoE-Lightning, section 4.1 and Figure 6 (S2). Steady layer time about W + n max(A + B, C), an upper bound.
    The text does not give the figure's order of transfers: here the weights go last.
    """

    example: ClassVar[Pipeline] = fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(
        decode_attention
    ) >> load >> gpu(out_proj, moe)

    least = 2

    @property
    def scheduler(self) -> StaticBatching:
        """See `Schedule.scheduler`: static batches, one micro-batch for each part."""
        return StaticBatching(self.parts)

    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        check_attention_on_cpu("FastDecode", stack)
        return attention_on_cpu(stack, step, self.parts, ahead=2, weights=WeightPlace.LAST)
