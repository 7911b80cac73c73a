"""Controls: choosers and sliders, each of which reads one of the settings and changes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from workbench.core.units import DTYPE_BYTES, QUANTISED, format_bytes
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, Stack, ranges_of
from workbench.schedules import Schedule
from workbench.serving.prepared import FEW_PARTS
from workbench.stages import kv
from workbench.widgets.state.figures import Plain
from workbench.widgets.state.ladders import ladder, nearest, whole_ladder
from workbench.widgets.state.offered import (
    has_weights,
    machine_label,
    machines_offered,
    models_offered,
    schedulers_offered,
    schedules_offered,
    workloads_offered,
)
from workbench.widgets.state.predictions import Refused
from workbench.widgets.state.settings import Settings, full_link, kv_bytes_per_token, kv_steps
from workbench.workload.resizing import sizes

_SLOWEST_LINK = 1 / 512  # of the link's full rate
_LEAST_GPU = 1 / 64  # of the GPU's memory
_NO_LIMIT = math.inf
_SHARES = tuple(step / 20 for step in range(21))


@dataclass(frozen=True)
class Step:
    """One position of a slider: its text, and the value that it stands for."""

    label: str
    value: Any


@dataclass(frozen=True)
class Slider:
    """A slider over steps in ascending order.

    Attributes
    ----------
    name, label : str
        Name in messages and as a field of `Explore`, and text beside it.
    steps : callable (Settings) -> sequence of Step
        The positions at these settings; none if the setting has no meaning there.
    read : callable (Settings) -> float
    write : callable (Settings, value) -> Settings
    """

    name: str
    label: str
    steps: Callable[[Settings], Sequence[Step]]
    read: Callable[[Settings], float]
    write: Callable[[Settings, Any], Settings]

    def at(self, settings: Settings) -> int:
        """Number of the position that is nearest to the setting."""
        values = tuple(step.value for step in self.steps(settings))
        value = self.read(settings)
        if value in values:
            return values.index(value)
        if value and min(values) > 0:
            return nearest(values, value)
        return min(range(len(values)), key=lambda place: abs(values[place] - value))

    def plain(self, settings: Settings, _: object = None) -> Plain | None:
        """The slider for the browser; None if it has no meaning at these settings."""
        steps = self.steps(settings)
        if len(steps) < 2:
            return None
        labels = [step.label for step in steps]
        place = self.at(settings)
        if steps[place].value != self.read(settings):
            labels[place] = self.told(settings)
        return {"name": self.name, "label": self.label, "kind": "slider", "at": place, "steps": labels, "note": ""}

    def told(self, settings: Settings) -> str:
        """The setting itself, where no position has exactly its value."""
        value = self.read(settings)
        return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"

    def moved(self, settings: Settings, place: object) -> Settings:
        """The settings with the slider at one of its positions."""
        steps = self.steps(settings)
        number = min(max(int(place), 0), len(steps) - 1)  # type: ignore[call-overload]
        return self.write(settings, steps[number].value)


@dataclass(frozen=True)
class Limit(Slider):
    """A slider over bytes, or bytes per second, of which the machine has so many.

    Attributes
    ----------
    per : str
        Text behind the bytes, such as ``/s``.
    """

    per: str = ""

    def plain(self, settings: Settings, _: object = None) -> Plain | None:
        """See `Slider.plain`."""
        found = super().plain(settings)
        return None if found is None else {**found, "note": f"of {self.steps(settings)[-1].label} that the machine has"}

    def told(self, settings: Settings) -> str:
        """See `Slider.told`."""
        return format_bytes(self.read(settings)) + self.per


class Capacity(Slider):
    """The slider over KV capacities, which are told in bytes."""

    def plain(self, settings: Settings, _: object = None) -> Plain | None:
        """See `Slider.plain`."""
        found = super().plain(settings)
        note = "chosen to suit the model, the machine and the requests" if settings.suited else ""
        return None if found is None else {**found, "note": note}

    def told(self, settings: Settings) -> str:
        """See `Slider.told`."""
        return format_bytes(settings.kv_capacity)


@dataclass(frozen=True)
class Chooser:
    """A chooser among named values.

    Attributes
    ----------
    name, label : str
    options : callable (Settings) -> {label: value}
    read : callable (Settings) -> value
    write : callable (Settings, value) -> Settings
    checked : bool
        True if options that these settings do not go together with are greyed, with the reason.
    note : callable (value) -> str
        Words beside an option.
    """

    name: str
    label: str
    options: Callable[[Settings], Mapping[str, Any]]
    read: Callable[[Settings], Any]
    write: Callable[[Settings, Any], Settings]
    checked: bool = False
    note: Callable[[Any], str] = lambda _: ""

    def plain(self, settings: Settings, refused: Callable[[Settings], Refused | None]) -> Plain:
        """The chooser for the browser."""
        chosen = self.read(settings)
        offered = self.options(settings)
        options = []
        for label, value in offered.items():
            why = refused(self.write(settings, value)) if self.checked and value != chosen else None
            options.append({"value": label, "label": label, "why": why.why if why else "", "note": self.note(value)})
        value = next((label for label, value in offered.items() if value == chosen), "")
        return {"name": self.name, "label": self.label, "kind": "choice", "value": value, "options": options}

    def moved(self, settings: Settings, label: object) -> Settings:
        """The settings with another choice; unchanged if there is none of this name."""
        offered = self.options(settings)
        return self.write(settings, offered[str(label)]) if str(label) in offered else settings


Control = Slider | Chooser


class Controls:
    """All controls around the settings that a widget began with.

    Parameters
    ----------
    start : Settings
        The model, machine, requests and scheduler that stand first among those offered.
    schedules : tuple of Schedule
        Schedules that stand first.
    """

    def __init__(self, start: Settings, schedules: tuple[Schedule, ...]) -> None:
        self._models = models_offered(start.model)
        self._machines = dict(machines_offered(start.machine))
        self._workloads = workloads_offered(start.workload)
        self._schedulers = schedulers_offered(start.scheduler)
        self._schedules = schedules_offered(schedules)
        self._start = start
        self.groups: Mapping[str, tuple[Control, ...]] = {
            "Model and machine": (
                Chooser(
                    "model",
                    "Model",
                    lambda _: self._models,
                    lambda now: now.model,
                    self._choose_model,
                    note=has_weights,
                ),
                Chooser("weights", "Weights in", _weight_formats, _weights_in, _format_of("weights"), checked=True),
                Chooser("kv", "KV cache in", _kv_formats, _kv_in, _format_of("kv"), checked=True),
                Chooser("machine", "Machine", self._offer_machines, lambda now: now.machine, Settings.on_machine),
                LINK,
                GPU_MEMORY,
            ),
            "Requests": (
                Chooser(
                    "workload", "Workload", lambda _: self._workloads, lambda now: now.workload, Settings.on_workload
                ),
                REQUESTS,
                PROMPT_LEN,
                OUTPUT_LEN,
            ),
            "Serving": (
                Chooser(
                    "scheduler",
                    "Scheduler",
                    self._offer_schedulers,
                    lambda now: now.scheduler,
                    _written("scheduler"),
                    checked=True,
                ),
                Chooser(
                    "schedule", "Schedule", self._offer_schedules, lambda now: now.schedule, _written("schedule"), True
                ),
                KV_CAPACITY,
                MAX_RUNNING,
                TOKEN_BUDGET,
                MICRO_BATCHES,
                WEIGHTS_ON_GPU,
                KV_ON_GPU,
            ),
        }

    def __iter__(self) -> Iterator[Control]:
        for group in self.groups.values():
            yield from group

    def __getitem__(self, name: str) -> Control:
        return next(control for control in self if control.name == name)

    def plain(self, settings: Settings, refused: Callable[[Settings], Refused | None]) -> Plain:
        """All controls for the browser, without those that have no meaning at these settings.

        With them come both memories' sizes, and whether the lanes share the cores of a CPU. `refused` says why settings
        do not go together.
        """
        groups = []
        for title, controls in self.groups.items():
            shown = [plain for control in controls if (plain := control.plain(settings, refused)) is not None]
            groups.append({"title": title, "controls": shown})
        machine = settings.limited
        memory = {"gpu": format_bytes(machine.gpu.memory), "cpu": format_bytes(machine.cpu.memory)}
        return {"groups": groups, "memory": memory, "shared": machine.shares_cores}

    @property
    def models(self) -> Iterable[ModelConfig]:
        """The models that are offered."""
        return self._models.values()

    @property
    def this_computer(self) -> Machine:
        """This computer as it is offered: with its calibration, if it has one."""
        return next(each for each in self._machines.values() if each.is_local)

    def schedules(self, settings: Settings) -> tuple[Schedule, ...]:
        """Every schedule that is offered, the chosen one with its settings."""
        return tuple(self._offer_schedules(settings).values())

    def schedule_named(self, kind: str) -> Schedule | None:
        """The schedule of a kind, by the name of its class."""
        return next((each for each in self._schedules.values() if type(each).__name__ == kind), None)

    def offer(self, machine: Machine) -> None:
        """Offer a machine in the place of the one with its name."""
        self._machines[machine_label(machine)] = machine

    def _offer_machines(self, settings: Settings) -> Mapping[str, Machine]:
        """Machines by name, that of the settings with its own calibration."""
        return {**self._machines, machine_label(settings.machine): settings.machine}

    def _choose_model(self, settings: Settings, model: ModelConfig) -> Settings:
        """Another model, or the first one in the precision that it began with."""
        found = settings.on_model(model)
        own = self._start
        if model == own.model:
            found = found.on(memory=own.memory)
            return found.on(kv_tokens=own.kv_tokens, suited=False) if found.machine == own.machine else found
        return found

    def _offer_schedulers(self, settings: Settings) -> Mapping[str, Any]:
        return {**self._schedulers, type(settings.scheduler).__name__: settings.scheduler}

    def _offer_schedules(self, settings: Settings) -> Mapping[str, Schedule]:
        """Schedules by name; those that were set, in the place of the first one of their kind."""
        found = dict[str, Schedule]()
        usual = self._schedules.values()
        own = {type(each): each for each in (*settings.tuned, settings.schedule) if each not in usual}
        for each in usual:
            shown = own.pop(type(each), each)
            found[shown.name] = shown
        return found


def _weight_formats(settings: Settings) -> Mapping[str, str | None]:
    """Formats of the weights by name, the model's own first."""
    model = settings.model
    experts, others = model.expert_dtype or model.dtype, model.other_dtype or model.dtype
    own = experts if experts == others else f"{experts} (experts) and {others}"
    plain = own == model.dtype and not model.has_formats
    whole = {dtype: dtype for dtype in DTYPE_BYTES if not plain or dtype != model.dtype}
    rounded = {f"experts in {form}, the rest as it is": form for form in QUANTISED}
    return {f"the model's own: {'as stored' if model.has_formats else own}": None, **whole, **rounded}


def _weights_in(settings: Settings) -> str | None:
    """Format of the weights; None for the model's own."""
    found = settings.memory.weights
    return found if found in _weight_formats(settings).values() else None


def _kv_formats(settings: Settings) -> Mapping[str, str | None]:
    """Formats of the KV cache by name, that of the model's own computations first."""
    own = settings.model.dtype
    return {f"the model's own: {own}": None, **{dtype: dtype for dtype in DTYPE_BYTES if dtype != own}}


def _kv_in(settings: Settings) -> str | None:
    """Format of the KV cache; None for the model's own."""
    found = settings.memory.kv
    return None if found == settings.model.dtype else found


def _format_of(field: str) -> Callable[[Settings, str | None], Settings]:
    """Another format of the weights or of the KV cache; a cache that was chosen to suit is chosen anew."""

    def write(settings: Settings, value: str | None) -> Settings:
        changes: dict[str, Any] = {field: value}
        found = settings.on(memory=replace(settings.memory, **changes))
        return found.with_suitable_kv() if settings.suited else found

    return write


# ------------------------------------------------------------------------------------------------------------ sliders


def _count_steps(number: int, low: int, high: int) -> Callable[[Settings], Sequence[Step]]:
    """Steps of one of the `sizes` of the requests, always with that of the requests as they are given."""

    def steps(settings: Settings) -> Sequence[Step]:
        values = whole_ladder(1 << (high.bit_length() // 2), low, high)
        own = sizes(settings.workload)[number]
        return [Step(f"{value:,}", value) for value in sorted({*values, own})]

    return steps


def _written(field: str) -> Callable[[Settings, Any], Settings]:
    return lambda settings, value: settings.on(**{field: value})


def _rates(settings: Settings) -> Sequence[Step]:
    full = full_link(settings.machine)
    return [Step(f"{format_bytes(rate)}/s", rate) for rate in ladder(full, full * _SLOWEST_LINK, full)]


def _gpu_sizes(settings: Settings) -> Sequence[Step]:
    most = settings.machine.gpu.memory
    return [Step(format_bytes(size), size) for size in ladder(most, most * _LEAST_GPU, most)]


@lru_cache(maxsize=16)
def _capacities(settings: Settings) -> Sequence[Step]:
    """The steps of a ladder with hundreds of them, which each drawing asks for a dozen times."""
    each = kv_bytes_per_token(settings.memory, settings.model)
    return [Step(format_bytes(tokens * each), tokens) for tokens in kv_steps(settings)]


def _has(thing: object, field: str) -> bool:
    """True if a frozen record of settings has a field."""
    return field in {each.name for each in fields(thing)} if hasattr(thing, "__dataclass_fields__") else False  # type: ignore[arg-type]


def _limits(settings: Settings) -> Sequence[Step]:
    if not _has(settings.scheduler, "max_running"):
        return []
    values = whole_ladder(64, 1, max(2, settings.requests))
    return [*(Step(f"{value:,}", value) for value in values), Step("no limit", _NO_LIMIT)]


def _set_limit(settings: Settings, value: float) -> Settings:
    limit = None if value == _NO_LIMIT else int(value)
    return settings.on(scheduler=replace(settings.scheduler, max_running=limit))  # type: ignore[type-var]


def _budgets(settings: Settings) -> Sequence[Step]:
    if not _has(settings.scheduler, "token_budget"):
        return []
    values = whole_ladder(1024, 32, 262_144)
    steps = [Step(f"{value:,} tokens", float(value)) for value in values]
    default = next(each.default for each in fields(settings.scheduler) if each.name == "token_budget")  # type: ignore[arg-type]
    return [*steps, Step("automatic", _NO_LIMIT)] if default is None else steps


def _set_budget(settings: Settings, value: float) -> Settings:
    budget = None if value == _NO_LIMIT else value
    return settings.on(scheduler=replace(settings.scheduler, token_budget=budget))  # type: ignore[type-var]


def _or_none(thing: object, field: str) -> float:
    value = getattr(thing, field, None)
    return _NO_LIMIT if value is None else float(value)


class MicroBatches(Slider):
    """The slider over micro-batches, which stays where it is under a schedule that has none."""

    def plain(self, settings: Settings, _: object = None) -> Plain | None:
        """See `Slider.plain`."""
        if self.steps(settings):
            return super().plain(settings)
        note = f"{settings.schedule.name} has none"
        return {"name": self.name, "label": self.label, "kind": "slider", "at": 0, "steps": ["–"], "note": note}


def _parts(settings: Settings) -> Sequence[Step]:
    if not _has(settings.schedule, "micro_batches"):
        return []
    least = getattr(type(settings.schedule), "least", 1)
    return [Step(f"{count}", count) for count in range(least, FEW_PARTS + 1)]


def _set_parts(settings: Settings, value: int) -> Settings:
    return settings.with_options(replace(settings.schedule, micro_batches=value))  # type: ignore[type-var]


def _fetches(pipeline: Pipeline | Stack) -> set[object]:
    return {item for each in ranges_of(pipeline) for item in each.pipeline.fetches}


def _shares_of(of_kv: bool) -> Callable[[Settings], Sequence[Step]]:
    def steps(settings: Settings) -> Sequence[Step]:
        streamed = _fetches(settings.pipeline)
        there = kv in streamed if of_kv else bool(streamed - {kv})
        return [Step(f"{share:.0%}", share) for share in _SHARES] if there else []

    return steps


def _set_weights_share(settings: Settings, value: float) -> Settings:
    return settings.on(memory=replace(settings.memory, weights_on_gpu=value))


def _set_kv_share(settings: Settings, value: float) -> Settings:
    return settings.on(memory=replace(settings.memory, kv_on_gpu=value))


def _set_capacity(settings: Settings, value: float) -> Settings:
    return settings.on(kv_tokens=value, suited=False)


LINK = Limit("link", "Link speed", _rates, lambda now: now.link, _written("link"), per="/s")
GPU_MEMORY = Limit("gpu_memory", "GPU memory", _gpu_sizes, lambda now: now.gpu_memory, _written("gpu_memory"))
REQUESTS = Slider(
    "requests",
    "Requests",
    _count_steps(0, 1, 100_000),
    lambda now: now.requests,
    _written("requests"),
)
PROMPT_LEN = Slider(
    "prompt_len",
    "Prompt tokens (mean)",
    _count_steps(1, 4, 32_768),
    lambda now: now.prompt_len,
    _written("prompt_len"),
)
OUTPUT_LEN = Slider(
    "output_len",
    "Output tokens (mean)",
    _count_steps(2, 1, 8_192),
    lambda now: now.output_len,
    _written("output_len"),
)
KV_CAPACITY = Capacity("kv_capacity", "KV capacity", _capacities, lambda now: now.kv_tokens, _set_capacity)
MAX_RUNNING = Slider(
    "max_running", "Batch (running at once)", _limits, lambda now: _or_none(now.scheduler, "max_running"), _set_limit
)
TOKEN_BUDGET = Slider(
    "token_budget", "Token budget", _budgets, lambda now: _or_none(now.scheduler, "token_budget"), _set_budget
)
MICRO_BATCHES = MicroBatches(
    "micro_batches", "Micro-batches", _parts, lambda now: getattr(now.schedule, "micro_batches", 1), _set_parts
)
WEIGHTS_ON_GPU = Slider(
    "weights_on_gpu",
    "Streamed weights kept on GPU",
    _shares_of(False),
    lambda now: now.memory.weights_on_gpu,
    _set_weights_share,
)
KV_ON_GPU = Slider(
    "kv_on_gpu", "Streamed KV kept on GPU", _shares_of(True), lambda now: now.memory.kv_on_gpu, _set_kv_share
)
SLIDERS = (
    LINK,
    GPU_MEMORY,
    REQUESTS,
    PROMPT_LEN,
    OUTPUT_LEN,
    KV_CAPACITY,
    MAX_RUNNING,
    TOKEN_BUDGET,
    MICRO_BATCHES,
    WEIGHTS_ON_GPU,
    KV_ON_GPU,
)
"""Every setting that is a number, in the order of the controls."""
