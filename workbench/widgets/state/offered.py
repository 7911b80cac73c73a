"""The models, machines, workloads, schedulers and schedules to choose from, with the reason where one cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.core.catalogue import cache_path, data_path
from workbench.core.errors import CheckpointError, WorkbenchError
from workbench.core.quiet import OTHERS
from workbench.core.units import QUANTISED, format_bytes
from workbench.hardware import Machine, machines
from workbench.hardware.assembly import machine as assembled
from workbench.hardware.profile import Profile
from workbench.models import ModelConfig, checkpoint, models
from workbench.scenario import Scenario
from workbench.scheduler.base import Scheduler
from workbench.scheduler.registry import every_scheduler
from workbench.schedules import Schedule
from workbench.schedules.contenders import every_candidate
from workbench.serving import fits
from workbench.serving.task_cost import profile_shape
from workbench.widgets.state.settings import Settings, whole_machine
from workbench.workload import Workload, workloads
from workbench.workload.resizing import resized

HELD = ("fp32", "bf16")
"""Formats of weights and KV cache that a run holds, beside those that experts are rounded to."""
_OUTPUT = 128
"""Output tokens of a workload whose publication leaves them open."""
_BUILT = (
    ("rtx-4090", "ryzen-7950x", "64GB ddr5-6000 x2"),
    ("rtx-5090", "ryzen-9950x", "96GB ddr5-6000 x2"),
    ("rtx-5090", "xeon-8380", "256GB"),
    ("rtx-pro-6000", "threadripper-7985wx", "512GB"),
    ("h100-pcie", "xeon-8480", "1TB"),
    ("h200-sxm", "epyc-9654", "1.5TB"),
)
"""Machines of today to begin with: GPU, CPU and memory."""


def models_offered(own: ModelConfig) -> Mapping[str, ModelConfig]:
    """The scenario's model, the checkpoints on this computer and the catalogue's models, by name."""
    found = {own.name: own}
    for path in _checkpoints():
        model = _checkpoint(path)
        if model is not None and model.path not in [known.path for known in found.values()]:
            found.setdefault(model.name, model)
    return {**found, **{name: model for name, model in models.items() if name not in found}}


def _checkpoints() -> list[Path]:
    folders = (data_path("models"), cache_path("models"))
    return [file.parent for folder in folders for file in sorted(folder.glob("*/config.json"))]


@lru_cache(maxsize=64)
def _checkpoint(path: Path) -> ModelConfig | None:
    """A checkpoint; None for one that is incomplete, or of an architecture that is not supported."""
    try:
        return checkpoint(path)
    except (CheckpointError, OSError):
        return None


def machines_offered(own: Machine) -> Mapping[str, Machine]:
    """The scenario's machine, this computer, machines of today, and those of the papers, by what they consist of."""
    found = dict[str, Machine]()
    for each in (whole_machine(own), Machine.local(), *_built(), *machines.values()):
        if each not in found.values():
            found.setdefault(machine_label(each), each)
    return found


@lru_cache(maxsize=1)
def _built() -> tuple[Machine, ...]:
    found = list[Machine]()
    for gpu, cpu, memory in _BUILT:
        found.append(assembled(gpu, cpu, memory=memory))
    return tuple(found)


def machine_label(machine: Machine) -> str:
    """The parts of a machine: ``NVIDIA A40 48 GB + Xeon 375 GB, link 19.5 GB/s``."""
    if machine.is_local:
        card = f" with {machine.gpu.name}" if machine.has_card else ""
        return f"this computer{card} ({format_bytes(machine.cpu.memory)})"
    gpu, cpu = machine.gpu, machine.cpu
    parts = f"{gpu.name} {format_bytes(gpu.memory)} + {cpu.name} {format_bytes(cpu.memory)}"
    return f"{parts}, link {format_bytes(min(machine.link.h2d, machine.link.d2h))}/s"


def workloads_offered(own: Workload) -> Mapping[str, Workload]:
    """The scenario's requests, and as many of every published workload, by name."""
    found = {own.name: own}
    for name, published in workloads.items():
        if name not in found:
            found[name] = _drawn(name, len(own), None if not isinstance(published.output, tuple) else _OUTPUT)
    return found


@lru_cache(maxsize=32)
def _drawn(name: str, requests: int, output_len: int | None) -> Workload:
    return workloads[name].sample(requests, output_len=output_len)


def schedulers_offered(own: Scheduler) -> Mapping[str, Scheduler]:
    """The scenario's scheduler and one of each other kind, by name."""
    others = (type(each)() for each in every_scheduler() if type(each) is not type(own))
    return {type(each).__name__: each for each in (own, *others)}


def schedules_offered(own: tuple[Schedule, ...]) -> Mapping[str, Schedule]:
    """The given schedules and every other one of the package, by name."""
    every = {schedule.name: schedule for schedule in own}
    return {**every, **{each.name: each for each in every_candidate() if each.name not in every}}


def unfit(settings: Settings) -> bool:
    """True if these settings do not go together, or do not fit the memories."""
    try:
        return not fits(settings.predicted(), settings.schedule)
    except WorkbenchError:
        return True


def has_weights(model: ModelConfig) -> str:
    """The place of a model's weights in words; empty if they are not on this computer."""
    return "" if model.path is None else "weights on this computer"


def why_not_live(settings: Settings) -> str:
    """The reason why the live engine cannot run these settings, or an empty text."""
    needs = list[str]()
    if settings.model.path is None:
        needs.append(f"a model whose weights are on this computer ({settings.model.name}'s are not)")
    if not settings.machine.is_local:
        needs.append("this computer as the machine")
    held = " or ".join(HELD)
    needs += [f"{what} in {held} ({found} was chosen)" for what, found in _not_held(settings).items()]
    return f"A run needs {' and '.join(needs)}." if needs else ""


def _not_held(settings: Settings) -> dict[str, str]:
    """The formats of weights and KV cache that were chosen and that a run does not hold."""
    chosen = {"weights": settings.memory.weights, "kv": settings.memory.kv}
    return {what: found for what, found in chosen.items() if found not in (None, *HELD, *QUANTISED)}


def in_held_formats(settings: Settings) -> Settings:
    """The settings with the model's own format in the place of each that a run does not hold."""
    own: dict[str, Any] = dict.fromkeys(_not_held(settings))
    return settings.on(memory=replace(settings.memory, **own))


def can_calibrate(scenario: Scenario) -> bool:
    """True where a calibration would bring simulations closer.

    Of a model with weights here, on this computer, that has none yet, or one that was made under load.
    """
    known = calibration_of(scenario)
    there = scenario.machine.is_local and scenario.model.path is not None
    return there and (known is None or known.others > OTHERS)


def calibration_of(scenario: Scenario) -> Profile | None:
    """The times of the model's operations on the machine, if they were measured."""
    return scenario.machine.profile(profile_shape(scenario.model, scenario.precision))


def runnable(settings: Settings, models: Iterable[ModelConfig], here: Machine) -> ModelConfig | None:
    """The model of the settings, or else the first, whose weights are on this computer and have room in its memory."""
    room = here.cpu.memory
    there = (each for each in (settings.model, *models) if each.path is not None and each.weight_bytes < room)
    return next(there, None)


def on_this_computer(settings: Settings, here: Machine) -> Settings | None:
    """The settings on this computer, with requests that it and the model take; None if none fit."""
    return shortened(with_this_machine(settings, here))


def with_this_machine(settings: Settings, here: Machine) -> Settings:
    """The settings on this computer, whether they fit it or not."""
    return settings if settings.machine.is_local else settings.on_machine(here)


def shortened(settings: Settings) -> Settings | None:
    """The settings with requests half as long, again and again until they fit; None if they never do."""
    found = settings
    while unfit(found):
        if found.prompt_len == found.output_len == 1:
            return None
        shorter = found.on(prompt_len=-(-found.prompt_len // 2), output_len=-(-found.output_len // 2))
        found = shorter.with_suitable_kv()
    return found


def too_long(settings: Settings) -> bool:
    """True if the longest request is longer than the model's positions."""
    workload = resized(settings.workload, settings.requests, settings.prompt_len, settings.output_len)
    held = workload.prompt_len[workload.longest] + workload.output_len[workload.longest] - 1
    return int(held) > settings.model.max_position_embeddings
