"""FlexGen's two schedules as MoE-Lightning draws them: decode attention on the CPU (S3) or on the GPU (S4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.pipeline.stack_graph import StackGraph
from workbench.scheduler.static import StaticBatching
from workbench.schedules.base import Step
from workbench.schedules.micro_batches import (
    Dataflow,
    MicroBatched,
    WeightPlace,
    attention_on_cpu,
    check_attention_on_cpu,
    shape,
    shapes,
    wrong_shape,
)
from workbench.schedules.plan import Task
from workbench.stages import attention, decode_attention, kv, moe, out_proj, prefill_attention, qkv, weights

_A, _K, _G, _S, _B = range(5)
_KV_TO_GPU = "gpu segment, h2d kv in, gpu segment, d2h kv out, gpu segment"


@dataclass(frozen=True)
class FlexGenS3(MicroBatched):
    """Attention on the CPU, one micro-batch after the other, while only the next layer's weights stream.

    Needs a pipeline of the shape ``gpu(...) >> offload >> cpu(...) >> load >> gpu(...)``. Two layers and
    ``micro_batches=2``, between the first and the last iteration::

        gpu Ea  A0a .   .   .   B0a Eb  A0b .   .   .   B0b A1a .   .   .   B1a Za  A1b .   .   .   B1b Zb
        cpu .   .   .   C0a .   .   .   .   .   C0b .   .   .   .   C1a .   .   .   .   .   C1b .   .   .
        d2h .   .   Q0a .   .   .   .   .   Q0b .   .   .   .   Q1a .   .   .   .   .   Q1b .   .   .   .
        h2d W1  .   .   .   H0a .   .   .   .   .   H0b .   W0  .   .   H1a .   .   .   .   .   H1b .   .

    Notes
    -----
    MoE-Lightning, section 4.1 and Figure 6 (S3). Steady layer time
    max(W, A + C + Q) + H + B + (n - 1)(A + C + B + Q + H). The text does not give the figure's order of transfers:
    by default the weights go first, so that the first attention output waits for them. ``weights=`` LAST and PAGED
    are never slower: over 400 random layers they were up to 1.4 and 1.9 times as fast.
    """

    example: ClassVar[Pipeline] = fetch(weights) | gpu(qkv, prefill_attention) >> offload >> cpu(
        decode_attention
    ) >> load >> gpu(out_proj, moe)

    weights: WeightPlace = WeightPlace.FIRST

    @property
    def scheduler(self) -> StaticBatching:
        """See `Schedule.scheduler`: static batches, one micro-batch for each part."""
        return StaticBatching(self.parts)

    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        check_attention_on_cpu("FlexGenS3", stack)
        return attention_on_cpu(stack, step, self.parts, ahead=1, weights=self.weights)


@dataclass(frozen=True)
class FlexGenS4(MicroBatched):
    """Attention on the GPU, while the next micro-batch's KV and the next layer's weights stream.

    Needs a pipeline of the shape ``fetch(weights, kv) | gpu(...)`` with operations before and behind decode_attention.
    There are two buffers for KV: the KV of the next micro-batch comes while the present one is computed. Two layers
    and ``micro_batches=2``, between the first and the last iteration::

        gpu Ea  A0a B0a F0a Eb  A0b B0b F0b A1a B1a F1a Za  A1b B1b F1b Zb
        d2h .   .   .   S0a .   .   .   S0b .   .   S1a .   .   .   S1b .
        h2d K0a W1  K0b .   K1a .   .   .   W0  K1b .   .   .   .   .   .

    Notes
    -----
    FlexGen; MoE-Lightning, section 4.1 and Figure 6 (S4). Steady layer time with pages
    max(W + n K, n (A + G + B)). The text does not give the figure's order of transfers: by default the weights
    go before the KV of the layer's second micro-batch; ``weights=`` LAST or PAGED puts them elsewhere.
    """

    example: ClassVar[Pipeline] = fetch(weights, kv) | gpu(qkv, attention, out_proj, moe)

    weights: WeightPlace = WeightPlace.FIRST

    @property
    def part_slots(self) -> int:
        """Two: one for the present micro-batch and one for the next."""
        return 2

    @property
    def scheduler(self) -> StaticBatching:
        """See `Schedule.scheduler`: static batches, one micro-batch for each part."""
        return StaticBatching(self.parts)

    def tasks(self, stack: StackGraph, step: Step) -> tuple[Task, ...]:
        """See `Schedule.tasks`."""
        if shape(stack) != _KV_TO_GPU:
            raise wrong_shape("FlexGenS4", "fetch(weights, kv) | gpu(qkv, attention, out_proj, moe)", shapes(stack))
        plan = Dataflow(stack, step, self.parts if self.weights is WeightPlace.PAGED else 1)
        turns = [(layer, part) for layer in range(stack.layers) for part in range(self.parts)]
        done: list[int] = []  # last task of each turn
        plan.run(0, _K, 0)
        for number, (layer, part) in enumerate(turns):
            plan.load_at(self.weights, layer, part, self.parts)
            for ahead, micro_batch in turns[number + 1 : number + 2]:
                plan.run(ahead, _K, micro_batch, *done[-1:])
            if not layer:
                plan.begin(part)
            for node in (_A, _G, _S):
                plan.run(layer, node, part)
            done.append(plan.run(layer, _B, part))
            if layer + 1 == stack.layers:
                plan.end(part)
        return plan.tasks
