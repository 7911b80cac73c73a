"""The needs of a scenario and schedule in each memory, and the nearest changes that make them fit if they do not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workbench.core.errors import CapacityError, WorkbenchError
from workbench.core.units import DTYPE_BYTES, QUANTISED, WEIGHT_BYTES, format_bytes, format_bytes_up, parse_bytes
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, Stack, fetch
from workbench.pipeline.layer_graph import NodeKind
from workbench.pipeline.stack_graph import StackGraph
from workbench.scenario import Scenario
from workbench.scheduler.base import most_running
from workbench.scheduler.layered_prefill import LayeredPrefill
from workbench.scheduler.resource_aware import ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import Schedule
from workbench.schedules.base import Lowering
from workbench.schedules.micro_batches import MicroBatched
from workbench.serving.host_kernels import experts_bytes, is_packed
from workbench.serving.ledger import Account, Change, Entry, Ledger
from workbench.serving.prepared import Prepared, price, slot_bytes
from workbench.serving.task_cost import TaskCost
from workbench.stages import (
    DEFERRED_BUFFERS,
    Op,
    Place,
    Precision,
    RowClass,
    Streamed,
    buffer_bytes,
    experts,
    head,
    head_format,
    kv,
    qkv,
    weights,
)
from workbench.workload import Workload

STREAMED: tuple[tuple[Streamed, str], ...] = ((experts.weights, "streamed experts"), (weights, "streamed weights"))
"""Weights that are streamed where all do not fit the GPU's memory, the fewest first, in words."""
_WORKLOADS = 4
"""Workloads whose lengths are kept for other scenarios with the same requests."""
_KEPT = 64
"""Needs of pipelines that are kept for other scenarios with the same."""


def fits(scenario: Scenario, schedule: Schedule) -> Ledger:
    """The ledger of both memories: true if everything fits, else with the cause and the mend. It allocates nothing.

    `bound`, `simulate` and `run` make this check before any work.

    Raises
    ------
    WorkbenchError
        If scenario and schedule do not go together.
    """
    return ledger(price(scenario, schedule))


def prepare(scenario: Scenario, schedule: Schedule) -> Prepared:
    """Lower and price a scenario, and check everything that can be known before any work, alike for every reader.

    Raises
    ------
    ScheduleError
        If the schedule needs another shape of pipeline.
    ScenarioError
        If an operation has no price, or prompts come in chunks that attention cannot take; see `price`.
    CapacityError
        If it does not fit the GPU's or the host's memory, by the ledger of `fits`.
    """
    prepared = price(scenario, schedule)
    found = ledger(prepared)
    if not found:
        raise CapacityError(lambda: found.verdict)
    return prepared


class Largest(NamedTuple):
    """The most that one iteration can hold.

    Attributes
    ----------
    tokens, requests : int
        Tokens and requests of the iteration.
    part_tokens : int
        Tokens of one part.
    part_blocks : float
        KV blocks that one part reads.
    """

    tokens: int
    requests: int
    part_tokens: int
    part_blocks: float

    def held(self, prefill: float, decode: float) -> float:
        """Bytes of all tokens, of which prefill and decode tokens take so many each; a request has one decode token."""
        return prefill * self.tokens + max(0.0, decode - prefill) * self.requests


def largest_batch(scenario: Scenario, schedule: Schedule, budget: float) -> Largest:
    """Bounds that no iteration exceeds, in whatever order the requests come.

    Three things limit the tokens: the scheduler's budget, or the longest prompt where that is longer; the KV cache,
    which holds all tokens; and the requests, of which no more are in it than the scheduler lets run. Layered prefill
    can have its whole budget in decodes beside the longest prompt. Preempted requests prefill their output anew.

    A static batch is split by its scheduler, however unevenly, so that one part can read all blocks. Other batches are
    divided evenly by the number of sequences. If each of these holds at most u and at least v of B blocks, one of m
    parts reads at most u blocks more than the share u / (u + (m - 1) v) of the rest. Where prompts come in chunks, it
    is 2 u blocks more: chunks are divided separately from the decodes.
    """
    block = scenario.memory.kv_block
    parts = schedule.parts
    lengths = _lengths(scenario.workload, block)
    widest = -(-lengths.held.longest // block)
    blocks = scenario.kv_blocks
    alone = lengths.prompts if lengths.blocks <= blocks else lengths.held  # without preemption no output is prefilled
    longest = alone.longest + (budget if isinstance(scenario.scheduler, LayeredPrefill) else 0)
    running = int(min(len(scenario.workload), most_running(scenario.scheduler)))
    tokens = int(min(max(budget, longest), blocks * block, alone.of(running)))
    requests = min(int(lengths.fewest.searchsorted(blocks, "right")), tokens, running)
    part_tokens = min(tokens, -(-tokens // parts) + alone.longest) if parts > 1 else tokens
    part_tokens = tokens if isinstance(scenario.scheduler, StaticBatching) else part_tokens
    share = widest / (widest + (parts - 1) * -(-(lengths.shortest + 1) // block))
    divisions = 2 if scenario.scheduler.splits(lengths.held.longest, scenario.model.num_hidden_layers) else 1
    over = divisions * widest
    read = min(blocks, over + max(0, blocks - over) * share, (-(-requests // parts) + divisions - 1) * widest)
    return Largest(tokens, requests, part_tokens, blocks if isinstance(scenario.scheduler, StaticBatching) else read)


class _Tokens(NamedTuple):
    """Tokens of so many of the longest requests together, (requests,) int64."""

    together: npt.NDArray[np.int64]

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.of(1)

    def of(self, requests: int) -> int:
        """Tokens of so many of the longest requests, at least one."""
        return int(self.together[requests - 1])


class _Lengths(NamedTuple):
    """Lengths of the requests of a workload, in tokens and blocks.

    Attributes
    ----------
    prompts, held : _Tokens
        Of the prompts, and of the tokens that a request holds at its end.
    blocks : int
        Blocks that all requests hold at their ends.
    fewest : ndarray (requests,) int64
        Blocks of so many of the shortest prompts together.
    shortest : int
        Tokens of the shortest prompt.
    """

    prompts: _Tokens
    held: _Tokens
    blocks: int
    fewest: npt.NDArray[np.int64]
    shortest: int


@lru_cache(maxsize=_WORKLOADS)
def _lengths(workload: Workload, block: int) -> _Lengths:
    prompt = workload.prompt_len
    held = prompt + workload.output_len - 1
    prompts, ends = (_Tokens(np.sort(tokens)[::-1].cumsum()) for tokens in (prompt, held))
    fewest = np.sort(-(-prompt // block)).cumsum()
    return _Lengths(prompts, ends, int((-(-held // block)).sum()), fewest, int(prompt.min()))


def embedding_bytes(model: ModelConfig, precision: Precision) -> float:
    """Embedding, head, final norm and sinks, which always stay on the GPU [B]."""
    usual = DTYPE_BYTES[precision.weights]
    embedding = (model.format_of("embed") if precision.as_stored else None) or usual
    matrices = model.head_params * head_format(model, precision) + model.embedding_params * embedding
    elements = model.norm_size + model.outside_params + (model.vocab_size if model.lm_head_bias else 0)
    sinks = model.num_hidden_layers * model.num_attention_heads if model.family.sinks else 0
    return matrices + elements * usual + sinks * DTYPE_BYTES["fp32"]


def positions(scenario: Scenario) -> int:
    """Positions whose RoPE angles are held: no sequence is longer than the model's positions, or than the KV cache."""
    return min(scenario.model.max_position_embeddings, scenario.kv_blocks * scenario.memory.kv_block)


def _angles(device: Place, scenario: Scenario) -> Entry:
    """Cosines and sines in fp32, where queries and keys are rotated."""
    model = scenario.model
    there = any(stage.op == qkv and stage.device is device for stage in scenario.stages)
    count = positions(scenario) if there else 0
    size = count * model.rotated_dims * DTYPE_BYTES["fp32"]
    return Entry("RoPE angles", size, f"{count} positions" if size else "")


def ledger(prepared: Prepared) -> Ledger:
    """The needs in both memories; see `fits`."""
    needs = _needs(prepared)
    gpu, host = needs.accounts(prepared.scenario, prepared.lowering.schedule, prepared.token_budget)
    found = Ledger(prepared.scenario.machine.name, gpu, host)
    return replace(found, search=partial(_changes, prepared, found, needs))


def most_blocks(prepared: Prepared) -> int:
    """The most KV blocks, no more than the scenario has, with which everything fits; 0 if there are none."""
    gone = _gone_blocks(prepared, _needs(prepared), 0)
    return 0 if gone is None else prepared.scenario.kv_blocks - gone


def _needs(prepared: Prepared) -> _Needs:
    scenario = prepared.scenario
    return _needs_of(prepared.lowering, prepared.cost, scenario.model, scenario.precision)


@lru_cache(maxsize=_KEPT)
def _needs_of(lowering: Lowering, cost: TaskCost, model: ModelConfig, precision: Precision) -> _Needs:
    """The needs of all scenarios that share tasks and prices."""
    return _Needs(lowering, cost, model, precision)


class _Operation(NamedTuple):
    """Memory that an operation takes beyond the buffers held.

    Attributes
    ----------
    name : str
    each : float
        Bytes per token.
    written : float
        Of these, the buffers that it writes: a second copy, beside that of the layer before.
    packed : ModelConfig or None
        The model, where the CPU takes other memory for experts, which it packs; see `experts_bytes`.
    """

    name: str
    each: float
    written: float
    packed: ModelConfig | None


class _Needs:
    """Needs of a scenario's pipeline in each memory, for any KV capacity, token budget and number of parts."""

    def __init__(self, lowering: Lowering, cost: TaskCost, model: ModelConfig, precision: Precision) -> None:
        self._slot = slot_bytes(lowering, cost)
        self._stack = lowering.stack
        self._cost = cost
        self._weights = {Place.GPU: embedding_bytes(model, precision), Place.CPU: 0.0}
        for layer, count in self._stack.alike:
            held = dict[tuple[Op, Place], None]()
            for stage in self._stack.stages(layer):
                pieces = self._stack.pieces(stage, layer)
                held.update({(piece.op, Place.CPU if piece.streamed else stage.device): None for piece in pieces})
            for op, home in held:
                self._weights[home] += count * op.weight_bytes(cost.model_at(layer), precision, layer)
        self._of_expert = list(_chosen_experts(self._stack, cost, model, precision))
        self._rows = dict[Place, list[int]]()
        self._operations = dict[Place, list[_Operation]]()
        for device, buffers in held_buffers(self._stack).items():
            self._rows[device] = [_row_bytes(buffers, rows, model, precision) for rows in RowClass.ALL.classes]
            self._operations[device] = list(self._operations_on(device, model, precision))

    def _operations_on(self, device: Place, model: ModelConfig, precision: Precision) -> Iterator[_Operation]:
        """The operations of a device in all sorts of layers."""
        for layer, _ in self._stack.alike:
            kind = self._cost.model_at(layer)
            for op in (stage.op for stage in self._stack.stages(layer) if stage.device is device):
                written = max(_row_bytes(op.writes, rows, model, precision) for rows in op.rows.classes)
                each = written + op.working_bytes(kind, precision)
                yield _Operation(op.name, each, written, kind if op.plain is experts and is_packed(kind) else None)

    def accounts(self, scenario: Scenario, schedule: Schedule, budget: float) -> tuple[Account, Account]:
        """The accounts of the GPU and of the host."""
        batch = largest_batch(scenario, schedule, budget)
        machine = scenario.machine
        gpu = self._entries(Place.GPU, scenario, schedule, batch)
        host = self._entries(Place.CPU, scenario, schedule, batch)
        return Account("GPU", gpu, machine.gpu.memory), Account("host", host, machine.cpu.memory)

    def _entries(self, device: Place, scenario: Scenario, schedule: Schedule, batch: Largest) -> tuple[Entry, ...]:
        memory = scenario.memory
        layers = scenario.model.num_hidden_layers
        per_block = memory.kv_block * scenario.model.kv_bytes_per_token(scenario.precision.kv)
        here = sum(self._stack.kv_device(layer) is device for layer in range(layers))
        cache = scenario.kv_blocks * per_block * self._kept_share(device, "kv_elements")
        of = "" if here == layers else f" in {here} of {layers} layers"
        also = "embedding and head too" if device is Place.GPU else "originals of what is streamed too"
        entries = [
            Entry("weights", self._weights[device], also if self._weights[device] else ""),
            Entry("KV cache", cache, f"{scenario.kv_blocks} blocks of {memory.kv_block} tokens{of}" if cache else ""),
        ]
        if scenario.model.state_elements or scenario.model.near_elements:
            entries.append(self._states(device, scenario, batch))
        if device is Place.GPU:
            slots = schedule.weight_slots
            entries.insert(1, Entry("weight slots", slots * self._slot, f"{slots} of {format_bytes(self._slot)}"))
            if self._stack.fetches_kv:
                slots = schedule.part_slots  # with more slots than parts, a part's KV of several layers is held
                count = min(batch.part_blocks * slots, scenario.kv_blocks * -(-slots // schedule.parts))
                widest = max(self._cost.model_at(layer).kv_elements for layer, _ in self._stack.alike)
                size = count * memory.kv_block * widest * DTYPE_BYTES[scenario.precision.kv]
                entries.append(Entry("fetched KV", size, f"{count:.0f} blocks of one layer"))
            if self._of_expert:
                entries.append(self._fetched_experts(scenario, schedule, batch))
        entries.append(_angles(device, scenario))
        copies = scenario.machine.gpu.count if device is Place.GPU else 1  # each GPU of a node holds all of them
        size = copies * batch.held(*self._rows[device])
        tokens = f"{batch.tokens} tokens{f' on each of {copies} GPUs' if copies > 1 else ''}" if size else ""
        entries.append(Entry("activations", size, tokens))
        entries.append(self._largest_operation(device, scenario, batch))
        entries.append(Entry("reserve", memory.reserve(device)))
        return tuple(entries)

    def _kept_share(self, device: Place, size: str) -> float:
        """Share of what all layers keep of a sequence that layers keep on this device."""
        total = 0.0
        here = 0.0
        for layer, count in self._stack.alike:
            kept = count * getattr(self._cost.model_at(layer), size)
            total += kept
            here += kept if self._stack.kv_device(layer) is device else 0.0
        return here / total if total else 0.0

    def _states(self, device: Place, scenario: Scenario, batch: Largest) -> Entry:
        """The states, and the last tokens beside compressed entries, that layers keep of every request."""
        model = scenario.model
        each = 0.0
        size = 0.0
        for name, dtype in (("state_elements", "fp32"), ("near_elements", scenario.precision.kv)):
            kept = model.num_hidden_layers * getattr(model, name) * DTYPE_BYTES[dtype]
            each += kept
            size += batch.requests * kept * self._kept_share(device, name)
        return Entry("states", size, f"{batch.requests} requests of {format_bytes(each)}" if size else "")

    def _fetched_experts(self, scenario: Scenario, schedule: Schedule, batch: Largest) -> Entry:
        """The most chosen experts that parts can have at once: no token chooses more than its own."""
        chosen = scenario.model.num_experts_per_tok * batch.part_tokens
        most = max(min(count, chosen) * size for count, size in self._of_expert)
        return Entry("fetched experts", schedule.part_slots * most, f"{schedule.part_slots} of {format_bytes(most)}")

    def _largest_operation(self, device: Place, scenario: Scenario, batch: Largest) -> Entry:
        """The operation that needs most memory beyond the buffers held; a lane computes one at a time, for one part."""
        needs = dict[str, float]()
        machine = scenario.machine
        on_cores = device is Place.CPU or (machine.host is not None and not machine.has_card)
        tokens = batch.part_tokens
        for name, each, written, packed in self._operations[device]:
            size = each * tokens
            if packed is not None and on_cores:
                size = written * tokens + experts_bytes(packed, scenario.precision, tokens)
            needs[name] = max(needs.get(name, 0.0), size)
        if device is Place.GPU:
            needs[head.name] = head.working_bytes(scenario.model, scenario.precision) * min(batch.requests, tokens)
        name = max(needs, key=lambda one: needs[one], default="")
        return Entry("largest operation", needs.get(name, 0.0), f"{name}, {tokens} tokens" if name else "")


def _chosen_experts(
    stack: StackGraph, cost: TaskCost, model: ModelConfig, precision: Precision
) -> Iterator[tuple[int, float]]:
    """Number and size of the experts of a layer that are streamed once they are chosen, for each sort of layers."""
    for layer, _ in stack.alike:
        pieces = (
            p for s in stack.stages(layer) if stack.pipeline(layer).streams_chosen(s) for p in stack.pieces(s, layer)
        )
        for op in dict.fromkeys(piece.op for piece in pieces if piece.streamed):
            count = op.members(model, layer)
            if count:
                yield count, op.weight_bytes(cost.model_at(layer), precision, layer) / count


def held_buffers(stack: StackGraph) -> dict[Place, set[str]]:
    """The buffers that a batch has on each device: those written there and those that transfers bring."""
    held: dict[Place, set[str]] = {Place.GPU: {"x"}, Place.CPU: set()}
    for node in stack.all_nodes:
        there = held[Place.GPU if node.lane in ("gpu", "h2d") else Place.CPU]
        there.update(buffer for buffer, _ in node.carries)
        there.update(buffer for stage in node.stages for buffer in stage.op.writes)
        there.update(DEFERRED_BUFFERS if node.kind is NodeKind.DEFERRED else ())
    return held


def _row_bytes(buffers: Iterable[str], rows: RowClass, model: ModelConfig, precision: Precision) -> int:
    """Bytes of one row of all these buffers together, each as wide as in the layers where it is widest."""
    kinds = [kind for kind, _ in model.unlike] or [model]
    total = 0
    for buffer in buffers:
        total += max(buffer_bytes(buffer, kind, precision, rows) for kind in kinds)
    return total


# ------------------------------------------------------------------------------------------- changes that make it fit


def _changes(prepared: Prepared, now: Ledger, needs: _Needs) -> Iterator[Change]:
    """Every single change that makes it fit."""
    yield from _less_cache(prepared, needs)
    yield from _fewer_tokens(prepared, needs)
    yield from _more_parts(prepared, needs)
    yield from _smaller_weights(prepared)
    yield from _streamed_weights(prepared, now)
    yield from _more_memory(prepared, now)


def _left(accounts: tuple[Account, ...]) -> float:
    """The bytes left free of the fuller memory; negative if it does not fit [B]."""
    return min(account.left for account in accounts)


def least_fitting(low: int, high: int, left: Callable[[int], float]) -> int | None:
    """The least whole number from `low` to `high` that leaves no memory short, or None.

    `left` gives the bytes left free, negative if a memory is short. All numbers above one that fits must fit. The
    search goes where a line through both ends says that it just fits, which is right at once where what is left is
    linear in the number; every third time it goes to the middle.
    """

    if low > high:
        return None
    room = left(high)
    if room < 0:
        return None
    short = left(low)
    if short >= 0:
        return low
    for step in itertools.count():
        if high - low == 1:
            break
        on_line = low + math.ceil((high - low) * (short / (short - room)))
        middle = (low + high) // 2 if step % 3 == 2 else min(max(on_line, low + 1), high - 1)
        at_middle = left(middle)
        if at_middle < 0:
            low, short = middle, at_middle
        else:
            high, room = middle, at_middle
    return high


def least_blocks(scenario: Scenario) -> int:
    """KV blocks of the longest request, the fewest that a cache may have."""
    workload = scenario.workload
    longest = int(workload.prompt_len[workload.longest] + workload.output_len[workload.longest] - 1)
    return -(-longest // scenario.memory.kv_block)


def _gone_blocks(prepared: Prepared, needs: _Needs, first: int) -> int | None:
    """The least number of KV blocks from `first` on without which everything fits, or None."""
    scenario = prepared.scenario
    schedule = prepared.lowering.schedule

    def left(gone: int) -> float:
        fewer = _with_blocks(scenario, scenario.kv_blocks - gone)
        return _left(needs.accounts(fewer, schedule, prepared.token_budget))

    return least_fitting(first, scenario.kv_blocks - least_blocks(scenario), left)


def _with_blocks(scenario: Scenario, blocks: int) -> Scenario:
    per_block = scenario.memory.kv_block * scenario.model.kv_bytes_per_token(scenario.precision.kv)
    return scenario.on(memory=replace(scenario.memory, kv_capacity=blocks * per_block))


def _less_cache(prepared: Prepared, needs: _Needs) -> Iterator[Change]:
    scenario = prepared.scenario
    schedule = prepared.lowering.schedule
    memory = scenario.memory
    blocks = scenario.kv_blocks
    per_block = memory.kv_block * scenario.model.kv_bytes_per_token(scenario.precision.kv)
    gone = _gone_blocks(prepared, needs, 1)
    if gone is not None:
        found = _with_blocks(scenario, blocks - gone)
        size = _down(found.kv_blocks * per_block, max(least_blocks(scenario), 0.99 * found.kv_blocks) * per_block)
        now = format_bytes(blocks * per_block)
        words = f"a KV capacity of {size}"
        yield Change(f"kv_capacity={size!r}", words, now, blocks / found.kv_blocks, found, schedule)


def _fewer_tokens(prepared: Prepared, needs: _Needs) -> Iterator[Change]:
    scenario = prepared.scenario
    schedule = prepared.lowering.schedule
    if not isinstance(scenario.scheduler, ResourceAware):
        return
    tokens = largest_batch(scenario, schedule, prepared.token_budget).tokens
    gone = least_fitting(1, tokens - 1, lambda n: _left(needs.accounts(scenario, schedule, tokens - n)))
    if gone is not None:
        budget = tokens - gone
        scheduler = replace(scenario.scheduler, token_budget=budget)
        now = f"up to {tokens} tokens per iteration"
        words = f"a token budget of {budget}"
        found = scenario.on(scheduler=scheduler)
        yield Change(f"token_budget={budget}", words, now, tokens / budget, found, schedule)


def _more_parts(prepared: Prepared, needs: _Needs) -> Iterator[Change]:
    scenario = prepared.scenario
    schedule = prepared.lowering.schedule
    if not isinstance(schedule, MicroBatched):
        return
    now = schedule.micro_batches
    requests = largest_batch(scenario, schedule, prepared.token_budget).requests

    def split(parts: int) -> Schedule:
        return replace(schedule, micro_batches=parts)

    parts = least_fitting(now + 1, requests, lambda n: _left(needs.accounts(scenario, split(n), prepared.token_budget)))
    if parts is not None:
        words = f"{parts} micro-batches"
        yield Change(f"micro_batches={parts}", words, f"{now}", parts / now, scenario, split(parts))


def _smaller_weights(prepared: Prepared) -> Iterator[Change]:
    scenario = prepared.scenario
    schedule = prepared.lowering.schedule
    precision = scenario.precision
    least = min(DTYPE_BYTES[precision.weights], precision.expert_bytes, precision.other_bytes)
    for dtype in (*sorted(DTYPE_BYTES, key=lambda name: -DTYPE_BYTES[name]), *QUANTISED):
        if WEIGHT_BYTES[dtype] < least:
            try:
                other = price(scenario.on(memory=replace(scenario.memory, weights=dtype)), schedule)
            except WorkbenchError:  # the model, the engine or the machine does not have this number format
                continue
            if _left(_needs(other).accounts(other.scenario, schedule, other.token_budget)) >= 0:
                factor = least / other.scenario.precision.expert_bytes
                now = str(scenario.weight_formats)
                yield Change(f"weights={dtype!r}", f"weights in {dtype}", now, factor, other.scenario, schedule)
                return


def _streamed_weights(prepared: Prepared, ledger: Ledger) -> Iterator[Change]:
    """The routed experts or all weights streamed to the GPU, where some stay there now."""
    scenario = prepared.scenario
    schedule = prepared.lowering.schedule
    some = any(item != kv for each in scenario.stack for item in each.pipeline.fetches)
    now = "only some are streamed" if some else "kept on the GPU"
    for item, words in STREAMED:
        try:
            other = price(scenario.on(pipeline=streaming(scenario.pipeline, item)), schedule)
        except WorkbenchError:  # the schedule takes no such pipeline
            continue
        accounts = _needs(other).accounts(other.scenario, schedule, other.token_budget)
        if _left(accounts) >= 0:
            factor = ledger.gpu.total / accounts[0].total
            tokens, then = (largest_batch(one.scenario, schedule, one.token_budget).tokens for one in (prepared, other))
            if then < tokens:  # a scheduler that fits its batches to the link
                now += f"; batches are up to {then:,} tokens then, not {tokens:,}"
            yield Change(f"fetch({item.name})", words, now, factor, other.scenario, schedule)
            return


def streaming(pipeline: Pipeline | Stack, item: Streamed) -> Pipeline | Stack:
    """The pipeline, or that of every range, with weights streamed in place of those that stay on the GPU."""
    if isinstance(pipeline, Stack):
        return Stack(tuple(each._replace(pipeline=_range_streaming(each.pipeline, item)) for each in pipeline.ranges))
    return _range_streaming(pipeline, item)


def _range_streaming(pipeline: Pipeline, item: Streamed) -> Pipeline:
    others = (each for each in pipeline.fetches if item != weights or each == kv)
    streaming = Pipeline(pipeline.chain, fetch(*others, item).fetches)
    return streaming if any(Pipeline(pipeline.chain, (item,)).streams(stage) for stage in pipeline.stages) else pipeline


def _more_memory(prepared: Prepared, now: Ledger) -> Iterator[Change]:
    scenario = prepared.scenario
    schedule = prepared.lowering.schedule
    if now.gpu.left >= 0 or now.host.left >= 0:
        short = now.gpu if now.gpu.left < 0 else now.host
        words = f"{format_bytes_up(short.total)} of {short.name} memory"
        larger = scenario.on(machine=roomy(scenario.machine, now))
        yield Change(words, words, format_bytes(short.capacity), short.total / short.capacity, larger, schedule)


def roomy(machine: Machine, needed: Ledger) -> Machine:
    """The machine with as much memory as a ledger needs."""
    gpu = replace(machine.gpu, memory=max(machine.gpu.memory, needed.gpu.total))
    cpu = replace(machine.cpu, memory=max(machine.cpu.memory, needed.host.total))
    raised = {}
    for lane, before, after in (("gpu", machine.gpu, gpu), ("cpu", machine.cpu, cpu)):
        if after.memory > before.memory:
            raised[f"{lane}.memory"] = f"raised to what is needed, from {format_bytes(before.memory)}"
    return replace(machine, gpu=gpu, cpu=cpu, sources=machine.sources_with(raised))


def _down(size: float, least: float) -> str:
    """A size in few digits, rounded down but not below the least."""
    unit, scale = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0)) if size >= s)
    shown = (f"{math.floor(size / scale * 10**digits) / 10**digits:.15g}{unit}" for digits in range(1, 15))
    return next((text for text in shown if parse_bytes(text) >= least), f"{size:.0f}B")
