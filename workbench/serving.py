"""The one serving loop. The virtual clock of `simulate` and the wall clock of `run` both turn it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from workbench.errors import CapacityError, ScenarioError, StoppedError
from workbench.models import ModelConfig
from workbench.plan import LANES, Plan
from workbench.result import Iterations, Result, Source
from workbench.scenario import Scenario
from workbench.scheduler.batch import Batch
from workbench.scheduler.block_manager import BlockManager
from workbench.schedules.base import Lowering, Schedule, Step
from workbench.segments import layer_graph
from workbench.stages import Device
from workbench.task_cost import TaskCost
from workbench.timeline import Timeline
from workbench.units import DTYPE_BYTES, format_bytes


class Clock(Protocol):
    """What makes time pass: it executes plans, virtually or for real."""

    timeline: Timeline

    @property
    def now(self) -> float:
        """Seconds since `begin`."""

    def begin(self, blocks: BlockManager) -> None:
        """Called once before the first plan, with the KV blocks that plans refer to."""

    def execute(self, plan: Plan, number: int, step: Step) -> dict[str, float]:
        """Run one iteration and move `now` to its end; busy seconds per lane."""


@dataclass(frozen=True)
class Progress:
    """How far a workload has been served.

    Attributes
    ----------
    seconds : float
        Time since the start [s].
    iterations : int
    prefill, decode : int
        Tokens of each class pushed through the model.
    emitted, total : int
        Output tokens generated, and to generate in all.
    used_blocks, blocks : int
        KV blocks in use during the last iteration, and in all.
    preemptions : int
    busy : mapping of lane to float
        Busy time per lane [s].
    """

    seconds: float = 0.0
    iterations: int = 0
    prefill: int = 0
    decode: int = 0
    emitted: int = 0
    total: int = 0
    used_blocks: int = 0
    blocks: int = 0
    preemptions: int = 0
    busy: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A scenario and schedule that fit together, lowered and priced."""

    scenario: Scenario
    lowering: Lowering
    cost: TaskCost
    token_budget: float

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.scenario.model.num_hidden_layers


def prepare(scenario: Scenario, schedule: Schedule) -> Prepared:
    """Lower and price, and check everything that can be known before any work.

    Raises
    ------
    ScheduleError
        If the schedule needs another shape of pipeline.
    CapacityError
        If weights, weight slots and KV cache do not fit the GPU's or the host's memory. Activations, and the KV that
        `fetch(kv)` brings for one part, are not counted: they depend on the batch.
    """
    if not isinstance(scenario, Scenario) or not isinstance(schedule, Schedule):
        raise ScenarioError(f"a reader takes a Scenario and a Schedule, not {scenario!r} and {schedule!r}.")
    graph = layer_graph(scenario.layer)
    lowering = Lowering(schedule, graph, scenario.model.num_hidden_layers)
    cost = TaskCost(scenario, graph)
    budget = scenario.scheduler.token_budget or cost.token_budget()
    prepared = Prepared(scenario, lowering, cost, budget)
    lowering.tasks(prepared.layers, Step.FIRST)
    _check_gpu_memory(prepared)
    _check_host_memory(prepared)
    return prepared


def embedding_bytes(scenario: Scenario) -> float:
    """Embedding, head and final norm, which always stay on the GPU [B]."""
    model = scenario.model
    tables = 1 if model.tie_word_embeddings else 2
    return (tables * model.vocab_size + 1) * model.hidden_size * DTYPE_BYTES[scenario.precision.weights]


def slot_bytes(prepared: Prepared) -> float:
    """Size of one weight slot: the largest weight transfer of any iteration [B]."""
    steps = (Step.FIRST, Step.MIDDLE, Step.LAST)
    tasks = [task for step in steps for task in prepared.lowering.tasks(prepared.layers, step)]
    return max((prepared.cost.largest_transfer(task.pieces) for task in tasks if task.pieces), default=0.0)


def _kv_bytes(scenario: Scenario) -> float:
    per_token = scenario.model.kv_bytes_per_token(scenario.precision.kv)
    return scenario.kv_blocks * scenario.memory.kv_block * per_token


def _placed_weights(prepared: Prepared, device: Device) -> float:
    """Bytes of weights that stay on a device: on the host also the originals of the streamed ones."""
    scenario = prepared.scenario
    total = 0.0
    for stage in scenario.layer.stages:
        home = Device.CPU if scenario.layer.streams(stage) else stage.device
        if home is device:
            total += stage.op.weight_bytes(scenario.model, scenario.precision)
    return total * prepared.layers


def _check_gpu_memory(prepared: Prepared) -> None:
    scenario, slots = prepared.scenario, prepared.lowering.schedule.weight_slots
    machine = scenario.machine
    resident = embedding_bytes(scenario) + _placed_weights(prepared, Device.GPU)
    if scenario.pipeline.kv_device is Device.GPU:
        resident += _kv_bytes(scenario)
    wanted, left = slots * slot_bytes(prepared), machine.gpu.memory - resident
    if left < 0:
        raise CapacityError(
            f"what stays on the GPU (embedding, head, weights not fetched, KV if it is there) needs "
            f"{format_bytes(resident)}; {machine.name!r} has {format_bytes(machine.gpu.memory)}. "
            "Fetch the weights, place stages on the cpu, or give more GPU memory."
        )
    if wanted > left:
        raise CapacityError(
            f"{slots} weight slots need {format_bytes(wanted)} of GPU memory; {machine.name!r} has "
            f"{format_bytes(left)} left. Fetch less per layer, or give more GPU memory."
        )


def _check_host_memory(prepared: Prepared) -> None:
    scenario = prepared.scenario
    wanted = _placed_weights(prepared, Device.CPU)
    if scenario.pipeline.kv_device is Device.CPU:
        wanted += _kv_bytes(scenario)
    if wanted > scenario.machine.cpu.memory:
        raise CapacityError(
            f"weights and KV cache on the host need {format_bytes(wanted)}; {scenario.machine.name!r} has "
            f"{format_bytes(scenario.machine.cpu.memory)}. Give less kv_capacity or a larger host."
        )


@dataclass
class _Record:
    """Grows with the iterations of one served workload."""

    first: npt.NDArray[np.float64]
    last: npt.NDArray[np.float64]
    seconds: list[float] = field(default_factory=list)
    prefill: list[int] = field(default_factory=list)
    decode: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))
    emitted: int = 0

    def add(self, batch: Batch, begin: float, end: float, used: int, busy: dict[str, float]) -> None:
        rows = batch.rows
        self.seconds.append(end - begin)
        self.prefill.append(int(rows.prefill))
        self.decode.append(int(rows.decode))
        self.used.append(used)
        self.emitted += int(rows.emits)
        for lane in busy:
            self.busy[lane] += busy[lane]
        fresh = batch.prefills[np.isnan(self.first[batch.prefills])]
        self.first[fresh] = end

    def progress(self, now: float, total: int, blocks: int, preemptions: int) -> Progress:
        return Progress(
            seconds=now,
            iterations=len(self.seconds),
            prefill=sum(self.prefill),
            decode=sum(self.decode),
            emitted=self.emitted,
            total=total,
            used_blocks=self.used[-1],
            blocks=blocks,
            preemptions=preemptions,
            busy=dict(self.busy),
        )


def serve(
    prepared: Prepared, clock: Clock, source: Source, watch: Callable[[Progress], object] | None = None
) -> Result:
    """Serve the scenario's workload to its end, one plan per iteration; `watch` is told after each.

    A clock that raises `StoppedError` ends it early: the result then is that of the iterations made, and says so.
    """
    scenario = prepared.scenario
    workload = scenario.workload
    longest = int((workload.prompt_len + workload.output_len).max())
    blocks = BlockManager(scenario.kv_blocks, scenario.memory.kv_block, len(workload), longest)
    queue = scenario.scheduler.open(workload, blocks, prepared.token_budget, prepared.layers)
    unset = np.full(len(workload), np.nan)
    record = _Record(unset, unset.copy())
    clock.begin(blocks)
    step, stopped = Step.FIRST, False
    try:
        while (batch := queue.next()) is not None:
            if queue.ends_with(batch):
                step |= Step.LAST
            begin, used = clock.now, blocks.total - blocks.free
            busy = clock.execute(prepared.lowering.plan(batch, step), len(record.seconds), step)
            record.last[queue.complete(batch)] = clock.now
            record.add(batch, begin, clock.now, used, busy)
            step = Step.MIDDLE
            if watch is not None:
                watch(record.progress(clock.now, int(workload.output_len.sum()), blocks.total, queue.preemptions))
    except StoppedError:
        if not record.seconds:
            raise
        stopped = True
    finally:
        queue.close()
        blocks.check()
    if not stopped:
        _check_served(scenario, record, blocks)
    return Result(
        source=source,
        schedule=prepared.lowering.schedule.name,
        model=scenario.model.name,
        machine=scenario.machine.name,
        seconds=clock.now,
        generated=record.emitted,
        processed=sum(record.prefill) + sum(record.decode),
        iterations=len(record.seconds),
        preemptions=queue.preemptions,
        recomputed=queue.recomputed,
        busy=record.busy,
        ttft=float(np.nanmean(record.first)),
        tbt=_mean_gap(record, workload.output_len),
        steps=Iterations(tuple(record.seconds), tuple(record.prefill), tuple(record.decode), tuple(record.used)),
        timeline=clock.timeline,
        facts=facts(scenario, prepared),
        stopped=stopped,
    )


def _check_served(scenario: Scenario, record: _Record, blocks: BlockManager) -> None:
    """A scheduler that stops early or keeps blocks must not pass for one that served everything."""
    open_requests = int(np.isnan(record.last).sum())
    if open_requests or record.emitted != scenario.workload.output_len.sum():
        raise ScenarioError(
            f"{scenario.scheduler} stopped with {open_requests} requests unfinished and {record.emitted} tokens "
            "emitted; its next() must hand out every request until it has emitted output_len tokens."
        )
    if blocks.used:
        raise CapacityError(
            f"{scenario.scheduler} kept {blocks.used} KV blocks after its last batch; its close() must not."
        )


def _mean_gap(record: _Record, output_len: npt.NDArray[np.int64]) -> float:
    several = (output_len > 1) & ~np.isnan(record.last)
    gaps = (record.last[several] - record.first[several]) / (output_len[several] - 1)
    return float(gaps.mean()) if several.any() else float("nan")


def facts(scenario: Scenario, prepared: Prepared) -> dict[str, str]:
    """What was asked for, to be told beside every number."""
    streamed = prepared.cost.weights_per_layer * prepared.layers
    return {
        "pipeline": str(scenario.layer),
        "workload": f"{scenario.workload.name}{' (synthetic)' if scenario.workload.synthetic else ''}",
        "requests": str(len(scenario.workload)),
        "scheduler": str(scenario.scheduler),
        "kv": f"{scenario.kv_blocks} blocks of {scenario.memory.kv_block} tokens in {scenario.precision.kv}",
        "weights": f"{format_bytes(streamed)} streamed per iteration in {scenario.weight_formats}",
        "link": f"{format_bytes(scenario.machine.link.h2d)}/s",
        "measured": scenario.machine.measured or "catalogue",
        "question": _digest(scenario),
        **_unlike_layers(scenario.model),
    }


def _unlike_layers(model: ModelConfig) -> dict[str, str]:
    """How a model whose layers differ is priced; nothing if they are all alike."""
    told = {}
    if model.dense_layers:
        told["layers"] = f"each priced as the mean of {model.moe_layers} with experts and {model.dense_layers} without"
    if model.windowed_layers:
        told["windows"] = (
            f"{model.windowed_layers} of {model.num_hidden_layers} layers attend to the last {model.sliding_window} "
            "tokens; their KV is kept whole"
        )
    return told


def _digest(scenario: Scenario) -> str:
    """Tells two scenarios apart in everything that changes a number: lengths, tokens, sizes and rates."""
    workload = scenario.workload
    digest = hashlib.sha256(workload.prompt_len.tobytes() + workload.output_len.tobytes())
    for part in (workload.requests, scenario.model, scenario.machine, scenario.memory, scenario.scheduler):
        digest.update(repr(part).encode())
    return digest.hexdigest()[:12]
