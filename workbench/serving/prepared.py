"""A scenario and a schedule lowered and priced together, and the settings that stand beside every number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from workbench.core.catalogue import data_path
from workbench.core.errors import ScenarioError, ScheduleError
from workbench.core.quiet import OTHERS, Noise
from workbench.core.records import read_json
from workbench.core.units import DTYPE_BYTES, QUANTISED, format_bytes, format_seconds
from workbench.hardware import Machine
from workbench.hardware.profile import Pace, Profile
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline
from workbench.pipeline.layer_graph import EMBED, HEAD, Node
from workbench.pipeline.stack_graph import StackGraph
from workbench.scenario import Scenario
from workbench.scheduler.base import most_running
from workbench.scheduler.block_manager import block_iterations
from workbench.schedules.base import Lowering, Schedule
from workbench.schedules.plan import Task, lay_out
from workbench.serving.plan_cost import PlanCost
from workbench.serving.task_cost import TaskCost
from workbench.stages import PartRows, Place, Precision, RowClass, Rows, Stage, decode_attention, kv
from workbench.workload import UNIFORM, Routing
from workbench.workload.lengths import Lengths

FEW_PARTS = 16
"""Number of parts that is allowed even for fewer requests; the default of every schedule is below it."""
_KEPT = 64
"""Prices, and schedules lowered by them, that are kept for other scenarios with the same."""
_ONE_OF_EACH = Rows(prefill=1, decode=1, pairs=1, context=2, emits=2)
_PROMPTS = 2
"""Mean prompts for which an iteration has room, where the scheduler names no budget."""


@dataclass(frozen=True)
class Prepared:
    """A scenario and a schedule that takes it, lowered and priced."""

    scenario: Scenario
    lowering: Lowering
    cost: TaskCost
    plans: PlanCost
    token_budget: float

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.scenario.model.num_hidden_layers

    @property
    def slot_bytes(self) -> float:
        """Size of one weight slot: the largest weight transfer of any iteration [B]."""
        return slot_bytes(self.lowering, self.cost)


def slot_bytes(lowering: Lowering, cost: TaskCost) -> float:
    """Size of one weight slot: the largest weight transfer of any iteration [B]."""
    return max((cost.exact_transfer(weights_of) for weights_of in lowering.brought), default=0.0)


def price(scenario: Scenario, schedule: Schedule) -> Prepared:
    """Lower and price a scenario and schedule, also if they do not fit the memories.

    Raises
    ------
    ScenarioError
        If these are no scenario and schedule, a device has no rate for a precision, or the scheduler prefills prompts
        in chunks where attention does not or cannot read the KV of the chunks before.
    ScheduleError
        If the schedule needs another shape of pipeline, or has more micro-batches than there are requests.
    """
    if not isinstance(scenario, Scenario):
        raise ScenarioError(f"a reader takes a Scenario first, not {scenario!r}.")
    if not isinstance(schedule, Schedule):
        raise ScenarioError(f"a reader takes a schedule such as VSLPipe() after the scenario, not {schedule!r}.")
    _check_parts(scenario, schedule)
    stack = scenario.graph
    _check_own_format(scenario)
    cost = _task_cost(stack, scenario.model, scenario.machine, scenario.precision, scenario.routing)
    typical = Typical.of(scenario, schedule) if schedule.by_times else None
    lowering, plans = _lowered(schedule, cost, stack, scenario.machine, typical)
    _check_chunks(scenario, stack)
    budget = scenario.scheduler.token_budget or _usual_budget(cost, scenario)
    lowering.check()
    return Prepared(scenario, lowering, cost, plans, budget)


def _usual_budget(cost: TaskCost, scenario: Scenario) -> float:
    """Tokens per iteration where the scheduler names none: see `TaskCost.token_budget`, and room for two mean prompts.

    A prompt enters only where the budget has room for it beside the decodes. With room for less than one, each request
    would be served alone; with room for one, each decode would keep the next prompt out.
    """
    prompt, _ = scenario.workload.mean_len
    return max(cost.token_budget, float(_PROMPTS * prompt))


@lru_cache(maxsize=_KEPT)
def _task_cost(
    stack: StackGraph, model: ModelConfig, machine: Machine, precision: Precision, routing: Routing
) -> TaskCost:
    """The prices of tasks, each operation with a price; shared by all scenarios that differ in nothing else."""
    cost = TaskCost(stack, model, machine, precision, routing)
    _check_rates(cost, machine, stack)
    return cost


@lru_cache(maxsize=_KEPT)
def _lowered(
    schedule: Schedule, cost: TaskCost, stack: StackGraph, machine: Machine, typical: Typical | None
) -> tuple[Lowering, PlanCost]:
    """A schedule's tasks and the prices of its plans; the typical batch is that of a schedule that orders by times."""
    plans = _plans(cost, machine)
    if typical is None:
        return Lowering(schedule, stack), plans
    times = _TypicalTimes(typical, plans, machine, schedule)
    return Lowering(schedule, stack, times.seconds, times.whole), plans


@lru_cache(maxsize=_KEPT)
def _plans(cost: TaskCost, machine: Machine) -> PlanCost:
    """The prices of plans, which all schedules share."""
    return PlanCost(cost, machine)


class Typical(NamedTuple):
    """The typical batch of a scenario: as many requests as the cache holds and may run, of all ages alike.

    Attributes
    ----------
    each : float
        Requests of each part.
    prompt, output : float
        Mean lengths of the requests.
    """

    each: float
    prompt: float
    output: float

    @classmethod
    def of(cls, scenario: Scenario, schedule: Schedule) -> Typical:
        """The typical batch of a scenario, divided into the parts of a schedule."""
        workload = scenario.workload.as_served
        held = block_iterations(workload.prompt_len, workload.output_len, scenario.memory.kv_block)
        in_cache = scenario.kv_blocks * float(workload.output_len.sum()) / float(held.sum())
        together = min(len(workload), in_cache, most_running(scenario.scheduler))
        each = max(1.0, together) / schedule.parts
        return cls(each, float(workload.prompt_len.mean()), float(workload.output_len.mean()))

    def decodes(self, model: ModelConfig) -> Rows:
        """Rows of the decodes of one part, at a layer of a model whose layers are of one kind."""
        tokens = self.prompt + self.output / 2
        context = self.each * float(model.attended(tokens))
        return Rows(decode=self.each, context=context, emits=self.each, scanned=model.indexed(self.each * tokens))

    def rows(self, model: ModelConfig) -> Rows:
        """Rows of one part, at a layer of a model whose layers are of one kind."""
        begun = self.each / self.output
        pairs = begun * float(model.attended_below(self.prompt))
        scored = model.indexed(begun * self.prompt * (self.prompt + 1) / 2)
        prefill = self.each * self.prompt / self.output
        emits = self.each + begun
        return self.decodes(model)._replace(prefill=prefill, pairs=pairs, emits=emits, scored=scored)


class _TypicalTimes:
    """Times of tasks for a typical batch."""

    def __init__(self, typical: Typical, plans: PlanCost, machine: Machine, schedule: Schedule) -> None:
        self._plans = plans
        self._cores = machine.cores
        self._packet = schedule.packet_seconds
        self._rows = [plans.cost.by_kind(typical.rows)] * schedule.parts
        self._decodes = [plans.cost.by_kind(typical.decodes)] * schedule.parts

    def seconds(self, tasks: Sequence[Task]) -> Sequence[float]:
        """Time of each task; where an operation declares no work, all take equally long."""
        cores = self._cores
        pace = None if cores is None else Pace(cores.gpu, cores.cpu, "", 0.0, 0.0)
        try:
            return self._plans.tasks(tasks, self._rows, pace)
        except ScenarioError:
            return [1.0] * len(tasks)

    def whole(self, tasks: Sequence[Task]) -> float:
        """Time of two iterations, of the batch and of its decodes alone: most iterations prefill nothing.

        Lanes slow one another down, see `PlanCost.lay_out`. Where an operation declares no work, all tasks take equally
        long.
        """
        try:
            return self._iteration(tasks, self._rows) + self._iteration(tasks, self._decodes)
        except ScenarioError:
            return max(lay_out(tasks, [1.0] * len(tasks), self._packet)[1])

    def _iteration(self, tasks: Sequence[Task], rows: Sequence[PartRows]) -> float:
        pace = None if self._cores is None else self._plans.pace(tasks, rows, self._cores)
        laid = self._plans.lay_out(tasks, rows, self._packet, pace, 0.0, skip=True)
        return max(laid.dram, laid.seconds)


def _check_parts(scenario: Scenario, schedule: Schedule) -> None:
    """Refuse more parts than requests: a request is in one part, and empty parts only lengthen the plans."""
    requests = len(scenario.workload)
    if schedule.parts > max(requests, FEW_PARTS):
        raise ScheduleError(
            f"{schedule.name} has {schedule.parts} micro-batches for {requests} requests, so that at least "
            f"{schedule.parts - requests} are always empty; give at most {requests}."
        )


def _check_rates(cost: TaskCost, machine: Machine, stack: StackGraph) -> None:
    """Check that every operation that declares its work has a price: its device has a rate for its precision."""
    cores = machine.cores
    threads = {"gpu": cores.gpu, "cpu": cores.cpu} if cores is not None else {"gpu": 0, "cpu": 0}
    for end in (EMBED, HEAD):
        cost.node(end, _ONE_OF_EACH, threads[end.lane])
    for layer, _ in stack.alike:
        for node in stack.at(layer):
            if node is None or node.lane not in threads:
                continue
            if all(stage.op.work is not None for stage in node.stages):
                cost.node(node, _ONE_OF_EACH, threads[node.lane], layer)


def _check_own_format(scenario: Scenario) -> None:
    """Check for rates of what is not rounded where experts are: it keeps its format, and no other can be asked for."""
    model = scenario.model
    if scenario.memory.weights not in QUANTISED:
        return
    places = dict.fromkeys((Place.GPU, *(stage.device for stage in scenario.stages if stage.op.has_weights)))
    for device in (scenario.machine.gpu if place is Place.GPU else scenario.machine.cpu for place in places):
        rates = dict(device.flops)
        if model.dtype not in rates:
            known = " or ".join(sorted(rates.keys() & DTYPE_BYTES.keys()))
            raise ScenarioError(
                f"Memory(weights={scenario.memory.weights!r}) rounds only the experts of {model.name!r}, whose other "
                f"weights stay in {model.dtype}, for which {device.name} has no FLOP rate; convert the checkpoint to "
                f"{known}, or give one of these as weights."
            )


def _check_chunks(scenario: Scenario, stack: StackGraph) -> None:
    """Check that attention can take chunks: it must read the KV of the chunks before, and be where the KV cache is."""
    workload = scenario.workload
    longest = int((workload.prompt_len + workload.output_len).max())
    if not scenario.scheduler.splits(longest, scenario.model.num_hidden_layers):
        return
    for graph in stack.graphs:
        for node in graph.nodes:
            for stage in node.stages:
                _check_chunk(scenario, stage, node, graph.pipeline)


def _check_chunk(scenario: Scenario, stage: Stage, node: Node, pipeline: Pipeline) -> None:
    """Check one stage of a node of a pipeline, see `_check_chunks`."""
    if _forgets(stage):
        raise ScenarioError(
            f"{scenario.scheduler} prefills prompts in pieces, and {stage} attends to its own piece alone; give "
            "Op(..., reads_past=True) and take k_before and v_before, or use a scheduler that prefills whole "
            "prompts, such as ContinuousBatching()."
        )
    fetched = kv in pipeline.fetches and any(other.op.keeps_kv for other in node.stages)
    if stage.op.reads_past and not fetched and stage.device is not pipeline.kv_device:
        raise ScenarioError(
            f"{scenario.scheduler} prefills prompts in pieces, and {stage} reads the KV of earlier ones, which is on "
            f"the {pipeline.kv_device.value}. Put it beside decode_attention, stream the cache with fetch(kv), or use "
            "a scheduler that prefills whole prompts, such as ContinuousBatching()."
        )


def _forgets(stage: Stage) -> bool:
    """True for a user's prompt attention that does not read the KV of earlier chunks."""
    op = stage.op
    return op.rows is RowClass.PREFILL and "k" in op.reads and op.run is not None and not op.reads_past


def facts(scenario: Scenario, prepared: Prepared, generated: Lengths | None = None) -> dict[str, str]:
    """The settings that stand beside every number.

    `generated` (requests,) are the tokens of each request, by default those that its workload tells.
    """
    known = scenario.workload.generated_len
    generated = known if generated is None else generated
    as_known = generated is known or np.array_equal(generated, known)
    streamed = prepared.cost.weights_per_layer * prepared.layers
    return {
        "pipeline": str(prepared.lowering.stack),
        "workload": f"{scenario.workload.name}{' (synthetic)' if scenario.workload.synthetic else ''}",
        "requests": str(len(scenario.workload)),
        "scheduler": str(scenario.scheduler),
        "kv": f"{scenario.kv_blocks} blocks of {scenario.memory.kv_block} tokens in {scenario.precision.kv}",
        "weights": f"{format_bytes(streamed)} streamed per iteration in {scenario.weight_formats}",
        "link": f"{format_bytes(scenario.machine.link.h2d)}/s",
        "measured": scenario.machine.measured or "catalogue",
        **_blemishes(prepared.cost.profile),
        **_left_out(scenario),
        "question": scenario.question if as_known else scenario.question_of(generated),
        **_early(scenario, generated),
        **_resident(prepared),
        **({} if scenario.routing == UNIFORM else {"routing": str(scenario.routing)}),
        **_unlike_layers(scenario.model, prepared.cost.profile),
        **_decodes(scenario, prepared.cost.decodes_at),
        **_joined(scenario.machine),
        **_rounded(scenario),
    }


def _resident(prepared: Prepared) -> dict[str, str]:
    """Notes on the weights and KV that stay on the GPU, as they are placed; empty without shares."""
    stack = prepared.lowering.stack
    told = {}
    if stack.resident:
        of = prepared.scenario
        streamed = replace(stack, resident=())
        whole = TaskCost(streamed, of.model, of.machine, of.precision, of.routing).weights_per_layer
        share = 1 - prepared.cost.weights_per_layer / whole if whole else 0.0
        told["weights on the GPU"] = f"{share:.2%} of what is streamed, in whole tensors"
    if stack.kv_resident:
        told["KV on the GPU"] = f"that of {len(stack.kv_resident)} of {stack.layers} layers"
    return told


def _rounded(scenario: Scenario) -> dict[str, str]:
    """Note on what rounding the experts costs in accuracy, as measured on the shipped model; empty without rounding."""
    as_stored = scenario.precision.keeps_int4(scenario.model.expert_dtype)
    if scenario.memory.weights not in QUANTISED or as_stored or not _exam():
        return {}
    own, *rounded = _exam()
    right = next(row["right"] for row in rounded if row["weights"] == scenario.memory.weights)
    return {
        "rounding": f"experts in {scenario.memory.weights}, {scenario.precision.group} columns to a scale; of the "
        f"{own['questions']} questions of {own['model']}'s exam {right:.2%} are answered correctly, in "
        f"{own['weights']} {own['right']:.2%}"
    }


@cache
def _exam() -> list[dict[str, Any]]:
    """Rows of the record of `bench rounding`: the shipped model in its own precision, and then with rounded experts."""
    path = data_path("models/tiny-moe/rounding.json")
    rows: list[dict[str, Any]] = read_json(path)["rows"] if path.is_file() else []
    return rows


def _decodes(scenario: Scenario, rate: str | None) -> dict[str, str]:
    """Note on the rate that prices decodes on a GPU, if it is not the one that the operation declares; else empty."""
    on_gpu = Stage(decode_attention, Place.GPU) in scenario.stages
    return {"attention": f"decodes on the GPU at its {rate} rate; it has none for fp32"} if rate and on_gpu else {}


def _joined(machine: Machine) -> dict[str, str]:
    """Note on the links over which several GPUs or sockets add up their partial sums; empty if that takes no time."""
    told = {}
    for what, device in (("GPUs", machine.gpu), ("sockets", machine.cpu)):
        if (over := device.between) is not None:
            told[what] = (
                f"{device.count}, joined by {format_bytes(over.rate)}/s and {format_seconds(over.latency)} a message"
            )
    return told


def _left_out(scenario: Scenario) -> dict[str, str]:
    """Note on the experts that decodes get late or never, which changes the model's answer; empty if there are none."""
    of = f"of {scenario.model.num_experts_per_tok} per decode token"
    told = {}
    for stage in scenario.stages:
        if stage.defer:
            told["deferred"] = f"{stage.defer} {of} one layer later"
        if stage.skip:
            told["skipped"] = f"{stage.skip} {of}"
    return told


def _unlike_layers(model: ModelConfig, profile: Profile | None) -> dict[str, str]:
    """Note on the pricing of a model whose layers differ; empty if all are alike."""
    told = {}
    if model.dense_layers:
        told["layers"] = f"{model.moe_layers} with experts and {model.dense_layers} without, each priced as it is"
        if profile is not None and model.shared_params:
            told["layers"] += "; networks of dense layers and shared experts were measured together"
    if model.unlike:
        told["kinds of layers"] = model.layers_in_words
    elif model.windowed_layers:
        near = f"their chunk of {model.sliding_window}" if model.chunked else f"the last {model.sliding_window}"
        told["windows"] = (
            f"{model.windowed_layers} of {model.num_hidden_layers} layers attend to {near} tokens; their KV is kept "
            "whole"
        )
    return told


def _early(scenario: Scenario, generated: Lengths) -> dict[str, str]:
    """Note on requests that ended before their output length; empty if there are none."""
    asked = scenario.workload.output_len
    early = int(np.count_nonzero(generated < asked))
    told = f"{early} requests before their output length, after {generated.sum()} of {asked.sum()} tokens in all"
    return {"ended": told} if early else {}


def _blemishes(profile: Profile | None) -> dict[str, str]:
    """Notes on a profile that is not the plain calibration of a quiet computer: corrected, or made under load."""
    if profile is None:
        return {}
    told = {"corrected": profile.corrected} if profile.corrected else {}
    if profile.others > OTHERS:
        told["calibrated"] = f"under load: {Noise(profile.others)}"
    return told
