"""Settings of the dashboard's controls, the scenario of settings, and the choices of models and machines."""

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
        The chosen ones; the machine with its full link rate.
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
    """Return the scenario of the settings, with the pipeline, scheduler and block size of `base`.

    Precisions are those of `base` for its own model, else the model's own.

    Raises
    ------
    WorkbenchError
        If the settings disagree, for example if the longest request does not fit the KV cache.
    """
    memory = base.memory
    model = settings.model
    if model != base.model:
        memory = replace(memory, weights=None, kv=None)
    return base.on(
        model=model,
        machine=slowed(settings.machine, settings.link),
        memory=replace(memory, kv_capacity=settings.kv_tokens * kv_bytes_per_token(base, model)),
        workload=workload(model, settings.requests, settings.prompt_len, settings.output_len),
    )


def settings_of(base: Scenario, schedule: Schedule) -> Settings:
    """Return the settings nearest to a scenario, with its mean lengths for all requests."""
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
    """Choose the least KV capacity that holds all requests at once, or else the largest that fits the memories.

    The least of all is returned where none fits; its prediction tells the reason.
    """
    wanted = settings.requests * (settings.prompt_len + settings.output_len)
    enough = next((place for place, step in enumerate(steps) if step >= wanted), len(steps) - 1)
    for step in reversed(steps[: enough + 1]):
        if _fits(base, replace(settings, kv_tokens=step)):
            return step
    return steps[0]


def _fits(base: Scenario, settings: Settings) -> bool:
    try:
        return bool(fits(scenario_of(base, settings, lengths_alone), settings.schedule))
    except WorkbenchError:
        return False


def lengths_alone(model: ModelConfig, requests: int, prompt_len: int, output_len: int) -> Workload:
    """Return requests of one length without token ids, for predictions."""
    return Workload.lengths(prompt_len, output_len, requests)


def why_not_live(scenario: Scenario) -> str:
    """Return the reason why the live engine cannot run this scenario, or an empty string."""
    if scenario.model.path is None:
        return f"{scenario.model.name} has no weights here"
    if not scenario.machine.is_local:
        return f"{scenario.machine.name} is not this computer"
    if not scenario.workload.requests:
        return f"the workload {scenario.workload.name} has lengths but no tokens"
    return ""


def random_tokens(model: ModelConfig, requests: int, prompt_len: int, output_len: int) -> Workload:
    """Return requests of one length with seeded random token ids."""
    drawn = np.random.default_rng(0).integers(model.vocab_size, size=(requests, prompt_len)).tolist()
    workload = Workload.of((Request(tuple(prompt), output_len) for prompt in drawn), name="random tokens")
    return replace(workload, synthetic=True)


def kv_bytes_per_token(base: Scenario, model: ModelConfig) -> float:
    """Size of one token's KV of `model` in the dashboard's precision [B]."""
    return model.kv_bytes_per_token(base.precision.kv if model == base.model else model.dtype)


def slowed(machine: Machine, link: float) -> Machine:
    """Limit the machine's link to `link` [B/s]; at the full rate the machine is returned unthrottled."""
    return machine if link >= full_link(machine) else machine.limit(link=link)


def full_link(machine: Machine) -> float:
    """Rate of the slower direction of the link [B/s]."""
    return min(machine.link.h2d, machine.link.d2h)


def with_whole_link(machine: Machine) -> Machine:
    """Return the machine with its full link rate, where that is known."""
    if not machine.throttled:
        return machine
    known = Machine.local() if machine.is_local else machines.get(machine.name)
    if known is None:
        return machine
    link_sources = {name: text for name, text in known.sources.items() if name.startswith("link.")}
    return replace(machine, link=known.link, throttled=False, sources={**machine.sources, **link_sources})


def models_offered(base: Scenario) -> Mapping[str, ModelConfig]:
    """List the scenario's model, the checkpoints on this computer and the catalogue's models, by name."""
    found = {base.model.name: base.model}
    for folder in (data_path("models"), cache_path("models")):
        for file in sorted(folder.glob("*/config.json")):
            try:
                model = checkpoint(file.parent)
            except (CheckpointError, OSError):
                continue  # incomplete, or of an architecture that is not supported
            if model.path not in [known.path for known in found.values()]:
                found.setdefault(model.name, model)
    return {**found, **{name: model for name, model in models.items() if name not in found}}


def machines_offered(base: Scenario) -> Mapping[str, Machine]:
    """List the scenario's machine, this computer and the catalogue's machines, by name."""
    found = {base.machine.name: with_whole_link(base.machine)}
    if not base.machine.is_local:
        local = Machine.local()
        found.setdefault(local.name, local)
    return {**found, **{name: machine for name, machine in machines.items() if name not in found}}


def ladder(anchor: float, low: float, high: float) -> tuple[float, ...]:
    """Return steps of a quarter octave through `anchor`, from `low` to `high`; always with the anchor."""
    first = math.ceil(_STEPS_PER_OCTAVE * math.log2(min(low, anchor) / anchor))
    last = math.floor(_STEPS_PER_OCTAVE * math.log2(max(high, anchor) / anchor))
    return tuple(anchor * 2 ** (step / _STEPS_PER_OCTAVE) for step in range(first, last + 1))


def whole_ladder(anchor: int, low: int, high: int) -> tuple[int, ...]:
    """Return the steps of `ladder` as integers."""
    return tuple(sorted({round(step) for step in ladder(anchor, low, high)}))
