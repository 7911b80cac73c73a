"""Public runs with experts on the CPU, beside simulations of data sheets alone: nothing is fitted.

Every machine is put together of its parts' nominal rates, derated by the one set of shares "sustained". Every run has
the placement that its flags say, and the device that its engine chooses for prompts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from workbench.core.errors import CatalogueError
from workbench.core.units import parse_bytes
from workbench.hardware import Machine
from workbench.hardware.assembly import machine
from workbench.hardware.processors import processors
from workbench.models import ModelConfig, models
from workbench.pipeline import Pipeline, cpu, fetch, gpu, load, offload
from workbench.pipeline.stack import Stack
from workbench.reproductions.rows import published
from workbench.scenario import Memory, Scenario
from workbench.scheduler.batch import NONE, Batch, Cut
from workbench.scheduler.chunked_prefill import ChunkedPrefill
from workbench.schedules import Overlap, Sequential
from workbench.schedules.base import Schedule, Step
from workbench.serving.prepared import Prepared, price
from workbench.simulate.clock import IterationClock
from workbench.stages import attention, combine, experts, moe, out_proj, qkv, route, shared_experts
from workbench.workload import Workload

DATA = "offload_runs"
ASSUMED_PROMPT = 512
ASSUMED_OUTPUT = 128
"""Lengths of a run whose source does not state them [tokens]."""
_BITS = 8
_COLUMNS = ("before", "prompt", "output", "prefill", "decode")
_OTHERS = ("embed", "qkv", "out_proj", "route", "shared_experts", "head")

BEFORE = gpu(qkv, attention, out_proj, route)
ALL_ON_GPU = gpu(qkv, attention, out_proj, moe)
AFTER = gpu(shared_experts, combine)
ON_CPU = BEFORE >> offload >> cpu(experts) >> load >> AFTER
PROMPTS_ON_GPU = fetch(experts.prefill.chosen) | (
    BEFORE >> (gpu(experts.prefill) | offload >> cpu(experts.decode) >> load) >> AFTER
)
BESIDE_SHARED = BEFORE >> (gpu(shared_experts) | offload >> cpu(experts) >> load) >> gpu(combine)
CHOSEN_FETCHED = fetch(experts.chosen) | ALL_ON_GPU


class Phase(enum.Enum):
    """The part of a run that a rate is of."""

    PREFILL = "prefill"
    DECODE = "decode"


class Lengths(NamedTuple):
    """Tokens in the cache, then prefilled, then generated; nan where the source does not say."""

    before: float
    prompt: float
    output: float


@dataclass(frozen=True, eq=False)
class PublicRun:
    """One published configuration with the rates that were measured.

    Attributes
    ----------
    name : str
        The machine's name and a number.
    sweep : str
        Runs of one author and machine that vary one or two settings; empty if it is alone.
    known : str
        "full" if GPU, CPU and memory speed are stated, else "partial" or "poor".
    unsayable : mapping of Phase to str
        Reasons for the phases that cannot be simulated.
    rates : mapping of Phase to tuple of (Lengths, float)
        The published rates of each phase [tokens/s].
    entry : mapping
        The entry of the data file.
    """

    name: str
    sweep: str
    known: str
    engine: str
    unsayable: Mapping[Phase, str]
    rates: Mapping[Phase, tuple[tuple[Lengths, float], ...]]
    entry: Mapping[str, Any]

    @property
    def simulated(self) -> tuple[Phase, ...]:
        """The phases with a published rate that can be simulated."""
        return tuple(phase for phase in Phase if self.rates[phase] and phase not in self.unsayable)


@dataclass(frozen=True)
class Compared:
    """One published rate and the simulated one [tokens/s]."""

    run: PublicRun
    phase: Phase
    lengths: Lengths
    published: float
    simulated: float

    @property
    def ratio(self) -> float:
        """Simulated over published rate."""
        return self.simulated / self.published


@cache
def public_runs() -> tuple[PublicRun, ...]:
    """All runs of the data file, in its order."""
    return tuple(map(_run, published(DATA)["runs"]))


def public_run(name: str) -> PublicRun:
    """The run of this name.

    Raises
    ------
    CatalogueError
        If there is none.
    """
    for run in public_runs():
        if run.name == name:
            return run
    raise CatalogueError(f"no public run {name!r}; there are {', '.join(run.name for run in public_runs())}.")


def _run(entry: Mapping[str, Any]) -> PublicRun:
    reasons = {phase: entry.get("unsayable", entry.get(f"{phase.value}_unsayable", "")) for phase in Phase}
    return PublicRun(
        name=entry["id"],
        sweep=entry.get("sweep", ""),
        known=entry["known"],
        engine=entry["engine"],
        unsayable={phase: reason for phase, reason in reasons.items() if reason},
        rates={phase: tuple(_rates(entry, phase)) for phase in Phase},
        entry=entry,
    )


def _rates(entry: Mapping[str, Any], phase: Phase) -> Iterator[tuple[Lengths, float]]:
    """The points of an entry's columns that have a rate of this phase."""
    count = max(len(entry[column]) for column in _COLUMNS if column in entry)
    columns = {column: entry.get(column, [math.nan] * count) for column in _COLUMNS}
    for before, prompt, output, rate in zip(
        columns["before"], columns["prompt"], columns["output"], columns[phase.value], strict=True
    ):
        if not math.isnan(rate):
            yield Lengths(before, prompt, output), float(rate)


# --------------------------------------------------------------------------------------- a run in the workbench's words


def scenario_of(run: PublicRun) -> Scenario:
    """The scenario of a run: one request with the lengths of its first point.

    Raises
    ------
    CatalogueError
        If it cannot be simulated.
    """
    if not run.simulated:
        reason = next(iter(run.unsayable.values()), "it has no rate.")
        raise CatalogueError(f"public run {run.name!r} cannot be simulated: {reason}")
    model = model_of(run)
    lengths = [stated(lengths) for phase in run.simulated for lengths, _ in run.rates[phase]]
    before, prompt, output = lengths[0]
    longest = max(map(sum, lengths))
    memory = Memory(kv_capacity=float((longest + 16) * model.kv_bytes_per_token(model.dtype)))
    workload = Workload(run.name, np.array([before + prompt]), np.array([output]))
    return Scenario(
        pipeline_of(run, model), model, machine_of(run), memory, workload, ChunkedPrefill(_batch_of(run, longest))
    )


def schedule_of(run: PublicRun) -> Schedule:
    """The order of the run's engine: KTransformers computes on both devices at once, with the others one waits."""
    return Overlap() if run.entry["place"] in ("beside", "share") else Sequential()


def model_of(run: PublicRun) -> ModelConfig:
    """The run's model, each weight in the bits of its format."""
    name = run.entry["model"]
    own = published(DATA)["models"]
    model = models[name] if name in models else _stand_in(name, own[name])
    chosen = run.entry.get("experts_per_token", model.num_experts_per_tok)
    bits = published(DATA)["quants"][run.entry["quant"]]
    sizes = {"experts": bits["experts"] / _BITS, **dict.fromkeys(_OTHERS, bits["others"] / _BITS)}
    return replace(model, num_experts_per_tok=chosen, formats=tuple(sizes.items()))


def _stand_in(name: str, sizes: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(name=name, **{key: value for key, value in sizes.items() if key != "source"})


def machine_of(run: PublicRun, efficiency: str = "sustained") -> Machine:
    """The run's machine, by its parts, with nominal rates derated by these shares.

    The cards of a machine count with the memory of all and the rates of one, unless they share every matrix. CPUs
    compute with vector instructions unless the engine uses AMX. Where everything is on the CPU, it takes the place of
    the GPU too, so that no operation, not even the head, is anywhere else.
    """
    parts = published(DATA)["machines"][run.name.partition("/")[0]]
    host = processors[parts["cpu"]]
    made = machine(
        replace(processors[parts["gpu"]], formats=("bf16", "fp16")),
        host if run.entry.get("amx") else replace(host, flops=math.nan),
        memory=parts["memory"],
        gpus=parts.get("gpus", 1),
        sockets=run.entry.get("sockets", parts.get("sockets", 1)),
        efficiency=efficiency,
    )
    if run.entry["place"] == "cpu":
        return replace(made, gpu=made.cpu)
    return replace(made, gpu=replace(made.gpu, memory=parse_bytes(parts["gpu_memory"])))


def pipeline_of(run: PublicRun, model: ModelConfig) -> Pipeline | Stack:
    """The run's placement; for a run on the CPU alone, see `machine_of`.

    Raises
    ------
    CatalogueError
        If the data file names another place than those known.
    """
    place = run.entry["place"]
    if place in ("gpu", "cpu"):
        return ALL_ON_GPU
    if place == "chosen":
        return CHOSEN_FETCHED
    if place == "share":
        return _shared_out(round(run.entry["on_gpu"] * model.num_local_experts), model.num_local_experts)
    if place == "beside":
        return _in_layers(BESIDE_SHARED, run.entry["on_cpu"], model.num_hidden_layers)
    if place == "layers":
        on_cpu = PROMPTS_ON_GPU if run.entry["prompts"] == "gpu" else ON_CPU
        return _in_layers(on_cpu, run.entry["on_cpu"], model.num_hidden_layers)
    raise CatalogueError(
        f"public run {run.name!r} has place={place!r}; give gpu, cpu, layers, beside, share or chosen."
    )


def _in_layers(on_cpu: Pipeline, layers: tuple[int, int], count: int) -> Pipeline | Stack:
    """A pipeline in some layers, and everything on the GPU in the others."""
    first, stop = layers
    edges = [(0, first, ALL_ON_GPU), (first, stop, on_cpu), (stop, count, ALL_ON_GPU)]
    ranges = [each[begin:end] for begin, end, each in edges if begin < end]
    whole = ranges[0]
    for each in ranges[1:]:
        whole = whole + each
    return whole


def _shared_out(here: int, count: int) -> Pipeline:
    """The first experts of each layer on the GPU and the others on the CPU, at work at the same time."""
    if here == 0:
        return BESIDE_SHARED
    if here == count:
        return ALL_ON_GPU
    first = gpu(experts[:here], shared_experts)
    return BEFORE >> (first | offload >> cpu(experts[here:]) >> load) >> gpu(combine)


# --------------------------------------------------------------------------------------------------------- simulation


@cache
def compared(run: PublicRun) -> tuple[Compared, ...]:
    """Each published rate of a run that can be simulated, beside the simulated one."""
    return tuple(_compare(run)) if run.simulated else ()


def _compare(run: PublicRun) -> Iterator[Compared]:
    scenario = scenario_of(run)
    prepared = price(scenario, schedule_of(run))
    for phase in run.simulated:
        for lengths, rate in run.rates[phase]:
            before, prompt, output = stated(lengths)
            if phase is Phase.PREFILL:
                chunks = _chunks(before, prompt, _batch_of(run, prompt), prepared.layers)
                found = prompt / sum(_seconds(prepared, each) for each in chunks)
            else:
                found = 1 / _seconds(prepared, _one_token(before + prompt + output // 2, prepared.layers))
            yield Compared(run, phase, lengths, rate, found)


def stated(lengths: Lengths) -> tuple[int, int, int]:
    """Tokens before, of the prompt and of the output, with the assumed ones where the source does not say."""
    values = (lengths.before, lengths.prompt, lengths.output)
    assumed = (0, ASSUMED_PROMPT, ASSUMED_OUTPUT)
    before, prompt, output = (
        other if math.isnan(value) else int(value) for value, other in zip(values, assumed, strict=True)
    )
    return before, prompt, output


def _batch_of(run: PublicRun, prompt: int) -> int:
    """Tokens of a prompt that the engine computes at a time."""
    usual = published(DATA)["engines"].get(run.engine, {})
    return int(run.entry.get("batch", usual.get("batch", prompt)))


def _chunks(before: int, prompt: int, size: int, layers: int) -> Iterator[Batch]:
    """The batches in which a prompt is prefilled behind what is in the cache."""
    edges = [*range(before, before + prompt, size), before + prompt]
    for start, stop in pairwise(edges):
        cut = Cut(np.array([start]), range(layers), np.array([stop == edges[-1]]))
        yield Batch(np.array([0]), np.array([stop - start]), NONE, NONE, layers, cut)


def _one_token(context: int, layers: int) -> Batch:
    """The batch of one token behind those in the cache."""
    return Batch(NONE, NONE, np.array([0]), np.array([context]), layers)


def _seconds(prepared: Prepared, batch: Batch) -> float:
    """Time of one iteration [s]."""
    clock = IterationClock(prepared)
    clock.execute(prepared.lowering.plan(batch, Step.MIDDLE), 0, Step.MIDDLE)
    clock.bar.close()
    return clock.now
