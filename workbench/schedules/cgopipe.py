"""MoE-Lightning's CGOPipe: pages of weights between the micro-batches' transfers, and attention two of these ahead."""

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
class CGOPipe(MicroBatched):
    """CPU attention two micro-batches ahead of the experts; a layer's weights come in one page per micro-batch.

    Needs a pipeline of the shape ``gpu(...) >> offload >> cpu(...) >> load >> gpu(...)`` and two micro-batches or
    more. Behind the attention output of each micro-batch the link carries one page of the next layer's weights, in
    this strict order: pages that overtook the small transfers would keep the GPU waiting. The last layer brings the
    weights with which the next iteration begins. Two layers and ``micro_batches=2``, between the first and the last
    iteration::

        gpu Ea   A0a  Eb   A0b  .    B0a  A1a  B0b  A1b  .    B1a  Za   B1b  Zb
        cpu .    .    .    C0a  .    C0b  .    .    C1a  .    C1b  .    .    .
        d2h .    .    Q0a  .    Q0b  .    .    Q1a  .    Q1b  .    .    .    .
        h2d .    .    .    .    H0a  W1.0 H0b  W1.1 .    H1a  W0.0 H1b  W0.1 .

    Notes
    -----
    MoE-Lightning, section 4.1, Algorithm 1 and Figure 6. Steady layer time max(W + n H, n (A + B), n C).
    The paper also copies pages from pageable to pinned memory, two of them ahead; here all weights on the host count
    as pinned, so that lane is absent. The pipeline says what is streamed: the paper keeps the attention projections on
    the GPU, ``fetch(experts.weights)``; with ``fetch(weights)`` the pages contain them too, and the first segment also
    waits for the last page.
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
        check_attention_on_cpu("CGOPipe", stack)
        return attention_on_cpu(stack, step, self.parts, ahead=2, weights=WeightPlace.PAGED)
