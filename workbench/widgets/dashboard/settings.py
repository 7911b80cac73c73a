"""What the dashboard's controls stand for, as values: settings, the scenario they make, and what there is to choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from workbench.core.catalogue import cache_path, data_path
from workbench.core.errors import CheckpointError, WorkbenchError
from workbench.core.units import parse_bytes
from workbench.hardware import Machine, machines
from workbench.models import ModelConfig, checkpoint, models
from workbench.scenario import Scenario
from workbench.schedules import Schedule
from workbench.serving import fits
from workbench.workload import Request, Workload

WorkloadOf = Callable[[ModelConfig, int, int, int], Workload]
_STEPS_PER_OCTAVE = 4


@dataclass(frozen=True)
class Settings:
    """One position of every control.

    Attributes
    ----------
    model, machine, schedule
        As chosen; the machine with its whole link.
    requests, prompt_len, output_len : int
        Workload [requests, tokens, tokens].
    kv_tokens : float
        KV capacity [tokens], so that it means the same for every model.
    link : float
        Rate that the link is slowed to [B/s].
    """

    model: ModelConfig
    machine: Machine
    schedule: Schedule
    requests: int
    prompt_len: int
    output_len: int
    kv_tokens: float
    link: float


def scenario_of(base: Scenario, settings: Settings, workload: WorkloadOf) -> Scenario:
    """The scenario that the settings describe, with the pipeline, scheduler and block size of `base`.

    Precisions are those of `base` for its own model, else the model's own.

    Raises
    ------
    WorkbenchError
        If the settings do not go together, for example if the longest request does not fit the KV cache.
    """
    memory, model = base.memory, settings.model
    if model != base.model:
        memory = replace(memory, weights=None, kv=None)
    return base.on(
        model=model,
        machine=slowed(settings.machine, settings.link),
        memory=replace(memory, kv_capacity=settings.kv_tokens * kv_bytes_per_token(base, model)),
        workload=workload(model, settings.requests, settings.prompt_len, settings.output_len),
    )


def settings_of(base: Scenario, schedule: Schedule) -> Settings:
    """The settings nearest to a scenario: its mean lengths for every request."""
    capacity = parse_bytes(base.memory.kv_capacity)
    return Settings(
        base.model,
        with_whole_link(base.machine),
        schedule,
        len(base.workload),
        round(base.workload.prompt_len.mean()),
        round(base.workload.output_len.mean()),
        capacity / kv_bytes_per_token(base, base.model),
        min(base.machine.link.h2d, base.machine.link.d2h),
    )


def suitable_kv(base: Scenario, settings: Settings, steps: Sequence[float]) -> float:
    """Of some KV capacities the least that holds all requests at once, or the largest that the memories have room for.

    The least of all where none fits: what is wrong is then told of it.
    """
    wanted = settings.requests * (settings.prompt_len + settings.output_len)
    enough = next((place for place, step in enumerate(steps) if step >= wanted), len(steps) - 1)
    tried = (replace(settings, kv_tokens=step) for step in reversed(steps[: enough + 1]))
    return next((one.kv_tokens for one in tried if _fits(base, one)), steps[0])


def _fits(base: Scenario, settings: Settings) -> bool:
    try:
        return bool(fits(scenario_of(base, settings, lengths_alone), settings.schedule))
    except WorkbenchError:
        return False


def lengths_alone(model: ModelConfig, requests: int, prompt_len: int, output_len: int) -> Workload:
    """Requests of one length without token ids, for what is only predicted."""
    return Workload.lengths(prompt_len, output_len, requests)


def why_not_live(scenario: Scenario) -> str:
    """Why the live engine cannot take this scenario, in one line; empty if it can."""
    if scenario.model.path is None:
        return f"{scenario.model.name} has no weights here"
    if not scenario.machine.is_local:
        return f"{scenario.machine.name} is not this computer"
    if not scenario.workload.requests:
        return f"the workload {scenario.workload.name} has lengths but no tokens"
    return ""


def random_tokens(model: ModelConfig, requests: int, prompt_len: int, output_len: int) -> Workload:
    """Requests of one length with seeded random token ids."""
    drawn = np.random.default_rng(0).integers(model.vocab_size, size=(requests, prompt_len)).tolist()
    workload = Workload.of((Request(tuple(prompt), output_len) for prompt in drawn), name="random tokens")
    return replace(workload, synthetic=True)


def kv_bytes_per_token(base: Scenario, model: ModelConfig) -> int:
    """KV of one token of `model` in the precision it has in the dashboard [B]."""
    return model.kv_bytes_per_token(base.precision.kv if model == base.model else model.dtype)


def slowed(machine: Machine, link: float) -> Machine:
    """The machine with its link at `link` [B/s], unthrottled at its full rate."""
    return machine if link >= full_link(machine) else machine.limit(link=link)


def full_link(machine: Machine) -> float:
    """Rate that both directions reach [B/s]."""
    return min(machine.link.h2d, machine.link.d2h)


def with_whole_link(machine: Machine) -> Machine:
    """The machine as it was before its link was slowed, where that is known."""
    if not machine.throttled:
        return machine
    known = Machine.local() if machine.is_local else machines.get(machine.name)
    if known is None:
        return machine
    sources = {**machine.sources, **{name: text for name, text in known.sources.items() if name.startswith("link.")}}
    return replace(machine, link=known.link, throttled=False, sources=sources)


def models_offered(base: Scenario) -> Mapping[str, ModelConfig]:
    """The scenario's model, the checkpoints on this computer and the catalogue, by name."""
    found = {base.model.name: base.model}
    for folder in (data_path("models"), cache_path("models")):
        for file in sorted(folder.glob("*/config.json")):
            try:
                model = checkpoint(file.parent)
            except (CheckpointError, OSError):
                continue  # half written, or of an architecture that nothing here can run
            if model.path not in [known.path for known in found.values()]:
                found.setdefault(model.name, model)
    return {**found, **{name: model for name, model in models.items() if name not in found}}


def machines_offered(base: Scenario) -> Mapping[str, Machine]:
    """The scenario's machine, this computer and the catalogue, by name."""
    found = {base.machine.name: with_whole_link(base.machine)}
    if not base.machine.is_local:
        local = Machine.local()
        found.setdefault(local.name, local)
    return {**found, **{name: machine for name, machine in machines.items() if name not in found}}


def ladder(anchor: float, low: float, high: float) -> tuple[float, ...]:
    """Steps of a quarter octave through `anchor`, from `low` to `high`; the anchor itself in any case."""
    first = math.ceil(_STEPS_PER_OCTAVE * math.log2(min(low, anchor) / anchor))
    last = math.floor(_STEPS_PER_OCTAVE * math.log2(max(high, anchor) / anchor))
    return tuple(anchor * 2 ** (step / _STEPS_PER_OCTAVE) for step in range(first, last + 1))


def whole_ladder(anchor: int, low: int, high: int) -> tuple[int, ...]:
    """`ladder` in whole numbers."""
    return tuple(sorted({round(step) for step in ladder(anchor, low, high)}))
