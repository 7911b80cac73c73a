"""Equal requests for a model on a machine, at every placement with as much on the GPU as fits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from workbench.analysis.advise.placements import Placement, placements
from workbench.analysis.advise.rows import FACTOR, Row, Worth, best, lengths
from workbench.analysis.shadow_prices import RESOURCES
from workbench.core.errors import ScenarioError
from workbench.core.units import DTYPE_BYTES
from workbench.hardware import Machine
from workbench.models import ModelConfig
from workbench.perfmodels import bound
from workbench.scenario import Memory, Scenario
from workbench.scheduler.base import Scheduler
from workbench.scheduler.resource_aware import ResourceAware
from workbench.scheduler.static import StaticBatching
from workbench.schedules import Schedule
from workbench.serving import fits
from workbench.serving.capacity import ledger, roomy
from workbench.serving.prepared import price
from workbench.simulate import simulate
from workbench.workload import Workload

GPU_RESERVE = 2.0**30
"""GPU memory that is kept free, at most a tenth of it: the margin of llama.cpp's ``--fit`` [B]."""
HOST_RESERVE = 4 * 2.0**30
"""Host memory that is kept free for the operating system, at most a tenth of it: assumed [B]."""
PROMPT_TOKENS = 2048
"""Prompt tokens that are computed at once: the default of llama.cpp's ``-b``; more where weights stream meanwhile."""
_BLOCK = 16
_OTHER_RESOURCES = {"CPU": "CPU and DRAM speed", "link": "link speed", "GPU": "GPU speed"}
"""Resources that have a shadow price and matter here, in words."""
_ONE_MEMORY = "GPU and CPU of this chip read one memory, whose bandwidth would count twice."


class Load:
    """One or several equal requests for a model on a machine."""

    def __init__(self, model: ModelConfig, machine: Machine, workload: Workload, weights: str | None) -> None:
        self._model = model
        self._machine = machine
        self._workload = workload
        self._weights = weights
        self.refused: dict[str, str] = {}

    def rows(self) -> list[Row]:
        """A row with its bound and simulation for every placement.

        Raises
        ------
        ScenarioError
            If no placement can be priced.
        """
        several = len(self._workload) > 1
        rows = self._placed(each for each in placements(self._model) if several or not each.of_batches)
        if not rows:
            raise ScenarioError(next(iter(self.refused.values())))
        return [_simulated(replace(row, bound=bound(row.scenario, row.schedule)) if row.fits else row) for row in rows]

    def worth(self, rows: Sequence[Row]) -> tuple[Worth, ...]:
        """The worth of `FACTOR` times as much of each resource for the best of these rows."""
        chosen = best(rows)
        if chosen is None:
            return ()
        found = [self._of_memory(chosen)]
        if self._machine.one_memory:
            return tuple(found)
        for resource, words in _OTHER_RESOURCES.items():
            with suppress(ScenarioError):  # an operation that runs on both devices was measured once
                richer = RESOURCES[resource](chosen.scenario, FACTOR)
                richer = richer.on(machine=roomy(richer.machine, fits(richer, chosen.schedule)))
                gain = simulate(richer, chosen.schedule).gen_tok_s / chosen.tok_s
                found.append(Worth(words, gain, chosen.placement))
        return tuple(found)

    def _of_memory(self, chosen: Row) -> Worth:
        """The worth of more GPU memory, in which more of the weights lie."""
        gpu = replace(self._machine.gpu, memory=FACTOR * self._machine.gpu.memory)
        richer = Load(self._model, replace(self._machine, gpu=gpu), self._workload, self._weights)
        everything, *others = placements(self._model)
        gaining = [each for each in others if _gains(each, chosen)]
        rows = [_simulated(row) for row in richer._placed([everything, *gaining])]
        more = best([chosen, *rows]) or chosen
        return Worth("GPU memory", more.tok_s / chosen.tok_s, more.placement)

    def _placed(self, tried: Iterable[Placement]) -> list[Row]:
        """A row without its speed for every placement that can be priced.

        The first is everything on the GPU: if that fits, there are no rows for parts of it.
        """
        rows = list[Row]()
        whole = False
        for number, placement in enumerate(tried):
            if placement.partial and whole:
                continue
            first = placement.layout(placement.steps[0])
            if self._machine.one_memory and first.on_both:
                self.refused[first.what] = _ONE_MEMORY
                continue
            try:
                rows.append(self._row(placement))
            except ScenarioError as error:
                self.refused[first.what] = str(error)
                continue
            if number == 0:
                whole = rows[0].fits and rows[0].at_once == rows[0].requests
        return rows

    def _row(self, placement: Placement) -> Row:
        """A placement at the highest step that fits the GPU, with less KV cache if it does not fit otherwise.

        Behind the last step all weights would be on the GPU, and no slots for them: a step takes its share of that, but
        for whole tensors.
        """
        first = placement.steps[0]
        last = placement.steps[-1]
        row = self._at(placement, first)
        each = (row.ledger.host["weights"] - row.ledger.gpu["weight slots"]) / (last + 1 - first)
        step = first
        ahead = min(_steps(row, each), last - step)
        while ahead > 0:
            further = self._at(placement, step + ahead)
            if further.ledger.gpu.left < 0:
                ahead -= 1
                continue
            row = further
            step += ahead
            ahead = min(_steps(row, each), last - step)
        return row if row.fits else _with_less_cache(row)

    def _at(self, placement: Placement, step: int) -> Row:
        """A placement at one step, with the KV cache of all requests."""
        layout = placement.layout(step)
        schedule = placement.schedule
        kv = self._weights if self._weights in DTYPE_BYTES else None
        per_block = _BLOCK * self._model.kv_bytes_per_token(kv or self._model.dtype)
        memory = Memory(
            kv_capacity=len(self._workload) * _blocks(self._workload) * per_block,
            kv_block=_BLOCK,
            weights=self._weights,
            kv=kv,
            gpu_reserve=gpu_reserve(self._machine),
            host_reserve=host_reserve(self._machine),
            weights_on_gpu=layout.kept,
        )
        few = max(PROMPT_TOKENS, len(self._workload))
        scheduler = _scheduler(schedule, None if placement.streams else few)
        scenario = Scenario(layout.pipeline, self._model, self._machine, memory, self._workload, scheduler)
        prepared = price(scenario, schedule)
        if prepared.token_budget < few:
            scenario = scenario.on(scheduler=_scheduler(schedule, few))
            prepared = price(scenario, schedule)
        return Row(layout.what, layout.known_as, len(self._workload), scenario, schedule, ledger(prepared))


def _steps(row: Row, each: float) -> int:
    """Steps that may fit the GPU memory that a row leaves; one more where it is nearly enough for it."""
    return int(row.ledger.gpu.left / each + 0.1) if each > 0 else 0


def _scheduler(schedule: Schedule, token_budget: float | None) -> Scheduler:
    """MoE-Lens' scheduler for its schedule, static batches for the others."""
    if isinstance(schedule.scheduler, ResourceAware):
        return ResourceAware(token_budget)
    return StaticBatching(schedule.parts, token_budget=token_budget)


def _gains(placement: Placement, chosen: Row) -> bool:
    """True if a placement may become the best with more GPU memory."""
    if placement.partial:
        return not placement.streams or placement.schedule == chosen.schedule
    return placement.layout(placement.steps[0]).what == chosen.placement


def _with_less_cache(row: Row) -> Row:
    """The row with as many requests at a time as fit, or as it is if not even one does."""
    prompt, output = lengths(row.scenario.workload)
    for change in row.ledger.changes:
        if change.scenario.kv_blocks < row.scenario.kv_blocks:
            held = change.scenario.kv_blocks // _blocks(row.scenario.workload)
            fewer = change.scenario.on(workload=Workload.lengths(prompt, output, held))
            return replace(row, scenario=fewer, ledger=fits(fewer, row.schedule))
    return row


def _simulated(row: Row) -> Row:
    return replace(row, simulated=simulate(row.scenario, row.schedule)) if row.fits else row


def _blocks(workload: Workload) -> int:
    """KV blocks that each of the equal requests has at its end."""
    prompt, output = lengths(workload)
    return -(-(prompt + output - 1) // _BLOCK)


def gpu_reserve(machine: Machine) -> float:
    return min(GPU_RESERVE, machine.gpu.memory / 10)


def host_reserve(machine: Machine) -> float:
    return min(HOST_RESERVE, machine.cpu.memory / 10)
