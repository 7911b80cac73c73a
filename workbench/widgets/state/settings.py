"""Settings: everything that a widget lets its reader choose, and the scenario that they make."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from workbench.core.errors import WorkbenchError
from workbench.core.units import parse_bytes
from workbench.hardware import Machine, machines
from workbench.models import ModelConfig
from workbench.pipeline import Pipeline, Stack
from workbench.scenario import Memory, Scenario
from workbench.scheduler.base import Scheduler
from workbench.schedules import Schedule
from workbench.serving import fits
from workbench.widgets.state.ladders import ladder
from workbench.workload import Routing, Workload
from workbench.workload.resizing import resized, sizes, thinned, with_tokens


@dataclass(frozen=True)
class Settings:
    """One position of everything that can be chosen.

    Attributes
    ----------
    pipeline, model, scheduler, routing, schedule
        As in a `Scenario` and its reader. The pipeline may be one that cannot be.
    machine : Machine
        The machine with its whole link and its whole memory.
    memory : Memory
        Precisions, block size, reserves and shares; its capacity is not used.
    workload : Workload
        The requests, before their number and lengths are changed.
    requests, prompt_len, output_len : int
        Number and mean lengths of the requests that are served.
    kv_tokens : float
        KV capacity [tokens], so that it means the same for every model.
    link : float
        Rate that the link is slowed to [B/s].
    gpu_memory : float
        Memory of the GPU that may be used [B].
    sample : int
        Number of the requests, evenly chosen, that stand for all in predictions; 0 for all.
    suited : bool
        True if the KV capacity was chosen to suit the model, the machine and the requests.
    tuned : tuple of Schedule
        Schedules whose options were set, at most one of a kind; they decide nothing but what is offered.
    """

    pipeline: Pipeline | Stack
    model: ModelConfig
    machine: Machine
    memory: Memory
    workload: Workload
    scheduler: Scheduler
    routing: Routing
    schedule: Schedule
    requests: int
    prompt_len: int
    output_len: int
    kv_tokens: float
    link: float
    gpu_memory: float
    sample: int = 0
    suited: bool = field(default=False, compare=False)
    tuned: tuple[Schedule, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, scenario: Scenario, schedule: Schedule) -> Settings:
        """The settings of a scenario."""
        whole = whole_machine(scenario.machine)
        requests, prompt_len, output_len = sizes(scenario.workload)
        given = {field.name: getattr(scenario, field.name) for field in fields(scenario) if field.name != "machine"}
        return cls(
            **given,
            machine=whole,
            schedule=schedule,
            requests=requests,
            prompt_len=prompt_len,
            output_len=output_len,
            kv_tokens=parse_bytes(scenario.memory.kv_capacity) / kv_bytes_per_token(scenario.memory, scenario.model),
            link=full_link(scenario.machine),
            gpu_memory=scenario.machine.gpu.memory,
        )

    @property
    def kv_capacity(self) -> float:
        """KV capacity [B]."""
        return self.kv_tokens * kv_bytes_per_token(self.memory, self.model)

    @property
    def limited(self) -> Machine:
        """The machine with the link and the GPU memory that are chosen."""
        machine = self.machine
        if self.gpu_memory < machine.gpu.memory:
            machine = machine.limit(gpu_memory=self.gpu_memory)
        return machine.limit(link=self.link) if self.link < full_link(machine) else machine

    def scenario(self) -> Scenario:
        """The scenario of these settings, with token ids as far as they were given.

        Raises
        ------
        WorkbenchError
            If the settings disagree, for example if the longest request does not fit the KV cache.
        """
        return self._scenario(resized(self.workload, self.requests, self.prompt_len, self.output_len))

    def predicted(self) -> Scenario:
        """The scenario without token ids, which change no prediction and take long to compare.

        Raises
        ------
        WorkbenchError
            As `scenario` does.
        """
        lengths = resized(self.workload, self.requests, self.prompt_len, self.output_len)
        if self.sample:
            lengths = thinned(lengths, self.sample)
        return self._scenario(replace(lengths, requests=()) if lengths.requests else lengths)

    def live(self) -> Scenario:
        """The scenario with token ids of the model, which a run needs; see `with_tokens`.

        Raises
        ------
        WorkbenchError
            As `scenario` does.
        """
        scenario = self.scenario()
        return scenario.on(workload=with_tokens(scenario.workload, self.model))

    def _scenario(self, workload: Workload) -> Scenario:
        memory = replace(self.memory, kv_capacity=self.kv_capacity)
        return Scenario(self.pipeline, self.model, self.limited, memory, workload, self.scheduler, self.routing)

    def on(self, **changes: Any) -> Settings:
        """The same settings with others in place of some."""
        return replace(self, **changes)

    def with_options(self, schedule: Schedule) -> Settings:
        """The settings with a schedule whose options were set; these are kept when another schedule is chosen."""
        others = (each for each in self.tuned if type(each) is not type(schedule))
        return self.on(schedule=schedule, tuned=(*others, schedule))

    def with_suitable_kv(self) -> Settings:
        """The settings with the KV capacity of `suitable_kv`."""
        return self.on(kv_tokens=suitable_kv(self), suited=True)

    def on_model(self, model: ModelConfig) -> Settings:
        """Another model in its own precision, with a cache that suits it."""
        memory = replace(self.memory, weights=None, kv=None)
        found = self.on(model=model, memory=memory)
        return found.with_suitable_kv()

    def on_machine(self, machine: Machine) -> Settings:
        """Another machine with its whole link and memory, and a cache that suits it."""
        found = self.on(machine=machine, link=full_link(machine), gpu_memory=machine.gpu.memory)
        return found.with_suitable_kv()

    def on_workload(self, workload: Workload) -> Settings:
        """Other requests as they are given, and a cache that suits them."""
        requests, prompt_len, output_len = sizes(workload)
        found = self.on(workload=workload, requests=requests, prompt_len=prompt_len, output_len=output_len)
        return found.with_suitable_kv()


def kv_steps(settings: Settings) -> tuple[float, ...]:
    """KV capacities to choose from [tokens]: from the longest request to four times all requests at once."""
    workload = resized(settings.workload, settings.requests, settings.prompt_len, settings.output_len)
    held = workload.prompt_len + workload.output_len
    least = float(held.max()) + settings.memory.kv_block
    return ladder(least, least, 4 * max(float(held.sum()), least), per_octave=8)


def suitable_kv(settings: Settings) -> float:
    """Choose the least KV capacity that holds all requests at once, or else the largest that fits [tokens].

    The least of all is returned where none fits; its prediction tells the reason.
    """
    steps = kv_steps(settings)
    workload = resized(settings.workload, settings.requests, settings.prompt_len, settings.output_len)
    wanted = float((workload.prompt_len + workload.output_len).sum())
    enough = next((place for place, step in enumerate(steps) if step >= wanted), len(steps) - 1)
    if _fits(settings.on(kv_tokens=steps[enough])):
        return steps[enough]
    low, high = 0, enough
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(settings.on(kv_tokens=steps[middle])):
            low = middle
        else:
            high = middle
    return steps[low]


def _fits(settings: Settings) -> bool:
    try:
        return bool(fits(settings.predicted(), settings.schedule))
    except WorkbenchError:
        return False


def kv_bytes_per_token(memory: Memory, model: ModelConfig) -> float:
    """Size of one token's KV [B]."""
    return model.kv_bytes_per_token(memory.kv or model.dtype)


def full_link(machine: Machine) -> float:
    """Rate of the slower direction of the link [B/s]."""
    return min(machine.link.h2d, machine.link.d2h)


def whole_machine(machine: Machine) -> Machine:
    """The machine without the limits that `Machine.limit` gave it, where the unlimited one is known."""
    known = _known(machine)
    if known is None:
        return machine
    memory = machine.gpu.memory if machine.gpu.memory < known.gpu.memory else None
    limited = known.limit(gpu_memory=memory, link=full_link(machine) if machine.throttled else None)
    if (limited.gpu, limited.link) != (machine.gpu, machine.link):
        return machine
    return replace(machine, gpu=known.gpu, link=known.link, throttled=known.throttled, sources=known.sources)


def _known(machine: Machine) -> Machine | None:
    """The machine of this name without limits, if there is one with the same GPU."""
    device = "cuda" if machine.has_card else "cpu"
    known = Machine.local(device=device) if machine.is_local else machines.get(machine.name)
    return known if known is not None and known.gpu.name == machine.gpu.name else None
